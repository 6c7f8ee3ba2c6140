# gemrun.pc: shared, then static.
# tool: echo pkgconf $(pkg-config --version)
# tool: cc --version
. "$ROOT/packaging/verify/install.in"
pkg-config --modversion gemrun
pkg-config --cflags --libs gemrun
cc $STRICT "$EXAMPLE/ask.c" $(pkg-config --cflags --libs gemrun) "-Wl,-rpath,$LIBDIR" -o "$WORK/shared"
readelf -d "$WORK/shared" | grep libgemrun
"$WORK/shared" "$MODEL"
cc $STRICT "$EXAMPLE/ask.c" $(pkg-config --cflags gemrun) "$LIBDIR/libgemrun.a" -pthread -lm -o "$WORK/static"
"$WORK/static" "$MODEL"
