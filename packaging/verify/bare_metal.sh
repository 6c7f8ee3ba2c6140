# Firmware of four emulated boards: the digest of a host.
# tool: arm-none-eabi-gcc --version
# tool: riscv64-linux-gnu-gcc --version
# tool: qemu-system-arm --version
for board in host an385 an500 an547 virt; do
  echo "$board:"
  make -s -C "$ROOT/examples/bare_metal" "BOARD=$board" "OUT=$WORK/bare-$board" \
    "MODEL=$ROOT/tests/golden/v1.0/tiny-int4.gembin" "CSRC=$ROOT/csrc" run
done
