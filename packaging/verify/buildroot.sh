# Parsed by Buildroot: chosen in a configuration, its facts, its own checker. Nothing is built.
# wants: buildroot
# tool: make --version
# tool: /usr/bin/python3 -c 'import flake8, magic, sys; print("Python", sys.version.split()[0])'
EXTERNAL=$ROOT/packaging/buildroot
out=$WORK/buildroot-out
mkdir -p "$out"
for arch in aarch64 riscv64; do
  case $arch in
    aarch64) chosen="BR2_aarch64=y" ;;
    riscv64) chosen="BR2_riscv=y" ;;
  esac
  printf '%s\n' "$chosen" BR2_TOOLCHAIN_BUILDROOT_CXX=y BR2_PACKAGE_GEMRUN=y > "$out/defconfig"
  make -s -C "$WORK/buildroot" "O=$out" "BR2_EXTERNAL=$EXTERNAL" "BR2_DEFCONFIG=$out/defconfig" defconfig
  grep -E "^(BR2_ARCH=|BR2_PACKAGE_GEMRUN|# BR2_PACKAGE_GEMRUN)" "$out/.config"
done
make -s -C "$WORK/buildroot" "O=$out" gemrun-show-info | sed 's/, "/,\n  "/g'
make -s -C "$WORK/buildroot" "O=$out" gemrun-show-depends
cd "$EXTERNAL"
# The checker imports magic and flake8: Debian's python3-magic, python3-flake8.
PATH=/usr/bin:/bin "$WORK/buildroot/utils/check-package" -b Config.in external.mk package/gemrun/Config.in package/gemrun/gemrun.mk
