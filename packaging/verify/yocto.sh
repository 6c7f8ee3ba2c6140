# The layer and its recipe, parsed by bitbake with all of OpenEmbedded-Core. Nothing is built.
# wants: bitbake
# wants: oe-core
# tool: python3 --version
# tool: localedef --version
build=$WORK/yocto/build
mkdir -p "$build/conf" "$WORK/yocto/tree"
# A copy: bitbake refuses to run as root, and another user may not be able to read this tree.
git -C "$ROOT" ls-files -z | tar -C "$ROOT" --null -T - -c | tar -C "$WORK/yocto/tree" -x
cat > "$build/conf/bblayers.conf" << EOF
BBPATH = "$build"
BBFILES = ""
BBLAYERS = "$WORK/oe-core/meta $WORK/yocto/tree/packaging/yocto/meta-gemrun"
EOF
cat > "$build/conf/local.conf" << EOF
MACHINE = "qemuarm64"
DISTRO = "nodistro"
BB_NUMBER_PARSE_THREADS = "2"
CONNECTIVITY_CHECK_URIS = ""
EOF
# bitbake wants this locale; here it lies in the folder of this run.
mkdir -p "$WORK/yocto/locale"
localedef -i en_US -f UTF-8 "$WORK/yocto/locale/en_US.UTF-8"
cat > "$WORK/yocto/run" << EOF
cd "$build"
export PATH="$WORK/bitbake/bin:$WORK/oe-core/scripts:/usr/sbin:/usr/bin:/sbin:/bin"
export BUILDDIR="$build" HOME="$build" \
  LOCPATH="$WORK/yocto/locale" LC_ALL=en_US.UTF-8 BB_ENV_PASSTHROUGH_ADDITIONS=LOCPATH
bitbake-layers show-layers
bitbake --parse-only
bitbake-layers show-recipes gemrun
bitbake --environment gemrun > environment
grep -E "^(PN|PV|LICENSE|PACKAGES|DEPENDS|EXTRA_OECMAKE|FILES:libgemrun)=" environment
EOF
if [ "$(id -u)" = 0 ]; then
  chown -R nobody "$WORK/yocto"
  setpriv --reuid=nobody --regid=nogroup --clear-groups sh -eu "$WORK/yocto/run"
else
  sh -eu "$WORK/yocto/run"
fi
