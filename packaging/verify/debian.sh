# The packages, built from a copy of the tracked files; unpacked, run, and linked against.
# tool: dpkg-buildpackage --version
# tool: lintian --version
# tool: cmake --version
mkdir "$WORK/debian" "$WORK/debian/gemrun"
git -C "$ROOT" ls-files -z | tar -C "$ROOT" --null -T - -c | tar -C "$WORK/debian/gemrun" -x
cd "$WORK/debian/gemrun"
cp -r packaging/debian .
# The packages that the build needs are Debian's: cmake of another environment is left out.
PATH=/usr/sbin:/usr/bin:/sbin:/bin dpkg-buildpackage -us -uc -b > "$WORK/debian.log" 2>&1 || { tail -n 30 "$WORK/debian.log"; exit 1; }
grep -E "passed" "$WORK/debian.log"
cd ..
ls *.deb
lintian --allow-root *.changes || true # its findings are the archive's affair; they stand here
for package in *.deb; do dpkg-deb -x "$package" "$WORK/unpacked"; done
LIBDIR=$(dirname "$(find "$WORK/unpacked" -name libgemrun.a)")
"$WORK/unpacked/usr/bin/gemrun" "$ROOT/tests/golden/v1.0/tiny-int4.gembin" --run-tests
cmake -S "$ROOT/examples/embed_c" -B "$WORK/debian/ask" "-DCMAKE_PREFIX_PATH=$WORK/unpacked/usr" > "$WORK/debian.log"
cmake --build "$WORK/debian/ask" >> "$WORK/debian.log"
LD_LIBRARY_PATH=$LIBDIR "$WORK/debian/ask/ask" "$ROOT/tests/golden/v1.0/tiny-int4.gembin"
