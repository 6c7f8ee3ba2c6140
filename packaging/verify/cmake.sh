# find_package(gemrun): examples/embed_c with the shared and the static library, and in C++.
# tool: cmake --version
# tool: cc --version
. "$ROOT/packaging/verify/install.in"
cmake -S "$EXAMPLE" -B "$WORK/ask" "-DCMAKE_PREFIX_PATH=$PREFIX" "-DCMAKE_C_FLAGS=$STRICT"
cmake --build "$WORK/ask"
for program in ask ask_static ask_cpp; do
  echo "$program:"
  "$WORK/ask/$program" "$MODEL"
done
