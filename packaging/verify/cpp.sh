# gemrun.hpp: the class that owns a context, under AddressSanitizer and UndefinedBehaviorSanitizer.
# tool: c++ --version
. "$ROOT/packaging/verify/install.in"
c++ -std=c++17 $STRICT -fsanitize=address,undefined -g "$EXAMPLE/ask.cpp" $(pkg-config --cflags gemrun) \
  "$LIBDIR/libgemrun.a" -pthread -o "$WORK/ask_cpp"
"$WORK/ask_cpp" "$MODEL"
if "$WORK/ask_cpp" /none.gembin; then exit 1; fi
echo "a model that is not there: refused, exit 1"
