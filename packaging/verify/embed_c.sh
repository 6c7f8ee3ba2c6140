# The program of examples/embed_c as its README builds it; attached.c with the daemon absent.
# tool: cc --version
. "$ROOT/packaging/verify/install.in"
cc $STRICT "$EXAMPLE/ask.c" "-I$PREFIX/include" "$LIBDIR/libgemrun.a" -pthread -lm -o "$WORK/embed"
"$WORK/embed" "$MODEL"
cc $STRICT -DGR_MINIMAL "$EXAMPLE/ask.c" "-I$PREFIX/include" "$LIBDIR/libgemrun_minimal.a" -pthread -lm -o "$WORK/embed_min"
"$WORK/embed_min" "$MODEL"
cc -std=c11 $STRICT "$EXAMPLE/attached.c" "-I$PREFIX/include" "$LIBDIR/libgemrun_control.a" "$LIBDIR/libgemrun.a" \
  -pthread -lm -o "$WORK/attached"
timeout 5 "$WORK/attached" "$MODEL" > "$WORK/answers" || true # it asks until it is stopped
test -s "$WORK/answers"
echo "attached.c: answers without a daemon"
