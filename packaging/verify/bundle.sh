# What `make bundle` runs, whole; then install.sh and a model, without a network.
# tool: zig=$("$PYTHON" -m ziglang version) && echo "zig $zig"
# tool: "$PYTHON" --version
bundle=$WORK/bundle
mkdir "$bundle" "$bundle/home" "$bundle/unpacked"
"$PYTHON" "$ROOT/tools/bundle.py" --output "$bundle/dist"
tar -C "$bundle/unpacked" -xf "$bundle"/dist/gembin-toolchain-*.tar
cd "$bundle/unpacked"/gembin-toolchain-*
echo "$(wc -l < SHA256SUMS) files, $(ls wheels | wc -l) wheels; engines: $(echo $(ls engine))"
# A checkpoint of random weights, by the tests of this tree: the bundle has no PyTorch.
(cd "$ROOT/tests" && "$PYTHON" -c 'import pathlib, sys, tiny; tiny.build("smollm2", pathlib.Path(sys.argv[1]))' "$bundle/tiny")

# Where namespaces are allowed the kernel gives no network; everywhere pip has no index, and
# nothing comes from the caller's environment: no settings of pip, no packages of his.
alone="env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 HOME=$bundle/home PYTHON=$PYTHON PIP_NO_INDEX=1 PIP_CONFIG_FILE=/dev/null"
if unshare -rn true 2> "$bundle/refused"; then
  alone="unshare -rn $alone"
fi
echo "interfaces: $($alone cat /proc/net/dev | sed -n 's/^ *\([^ :]*\):.*/\1/p' | xargs)"
$alone ./install.sh "$bundle/installed"
bin=$bundle/installed/bin
$alone "$bin/python" -m pip check
cd "$bundle"
# What times this machine goes into files, not into the log.
$alone "$bin/gemmake" --model tiny --target generic-x86-64 --output tiny.gembin > made.txt
grep -E "^(tensors|weights|SUCCESS)" made.txt
$alone "$bin/gemcheck" tiny.gembin --run
$alone "$bin/gembench" --model tiny.gembin --prompt "The conveyor stops when" > bench.txt
grep "^memory:" bench.txt
$alone "$bin/gemctl" --version
ask() { # GEMRUN: eight sampled ids
  $alone "$1" tiny.gembin --prompt "The conveyor stops when" --max-tokens 8 --temperature 1 --top-k 0 --top-p 1 --seed 7 --tokens 2> told.txt
}
ask "$bin/gemrun" > installed.txt
for engine in unpacked/*/engine/x86_64-*; do
  echo "${engine##*/}: $($alone "$engine/bin/gemrun" tiny.gembin --run-tests 2>&1)"
  ask "$engine/bin/gemrun" | cmp - installed.txt
done
echo "equal answers: $(cat installed.txt)"
