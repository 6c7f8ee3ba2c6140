# A model in a task of low priority that another interrupts, on two emulated boards.
# wants: freertos
# tool: arm-none-eabi-gcc --version
# tool: qemu-system-arm --version
EXAMPLE=$ROOT/examples/freertos
board() { # BOARD PORT FLAGS..
  board=$1 port=$WORK/freertos/portable/GCC/$2
  shift 2
  out=$WORK/freertos-$board
  mkdir -p "$out"
  for source in tasks list queue; do
    arm-none-eabi-gcc "$@" -O2 -ffunction-sections "-I$EXAMPLE" "-I$WORK/freertos/include" "-I$port" \
      -c "$WORK/freertos/$source.c" -o "$out/$source.o"
  done
  arm-none-eabi-gcc "$@" -O2 -ffunction-sections "-I$EXAMPLE" "-I$WORK/freertos/include" "-I$port" \
    -c "$port/port.c" -o "$out/port.o"
  arm-none-eabi-ar rc "$out/libfreertos.a" "$out/tasks.o" "$out/list.o" "$out/queue.o" "$out/port.o"
  echo "$board:"
  make -s -C "$EXAMPLE" "BOARD=$board" "OUT=$out" "CSRC=$ROOT/csrc" "FREERTOS_LIB=$out/libfreertos.a" \
    "FREERTOS_INCLUDE=$WORK/freertos/include $port" "MODEL=$ROOT/tests/golden/v1.0/tiny-int4.gembin" run
}
board an385 ARM_CM3 -mcpu=cortex-m3 -mthumb
board an500 ARM_CM7/r0p1 -mcpu=cortex-m7 -mthumb -mfloat-abi=hard
