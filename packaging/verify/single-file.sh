# gemrun.c and gemrun.h alone: the whole engine, then the minimal one.
# tool: cc --version
"$PYTHON" -m gemmake.cli engine --single-file --output "$WORK/one"
wc -l "$WORK/one/gemrun.c"
cp "$ROOT/examples/embed_c/ask.c" "$WORK/one"
cd "$WORK/one"
for kind in GR_WHOLE GR_MINIMAL; do
  cc -std=c11 -O2 -ffp-contract=off -Wall -Wextra -Wpedantic -Wconversion -Werror "-D$kind" -I. ask.c gemrun.c -pthread -o ask
  echo "$kind:"
  ./ask "$ROOT/tests/golden/v1.0/tiny-int4.gembin"
done
