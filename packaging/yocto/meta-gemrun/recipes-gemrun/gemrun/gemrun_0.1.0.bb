SUMMARY = "Runs compiled language models with known memory and the same answer anywhere"
LICENSE = "Apache-2.0"
LIC_FILES_CHKSUM = "file://LICENSE;md5=3b83ef96387f14655fc854ddc3c6bd57"

# The sources are the tree that this layer lies in. Where they come from a server, a bbappend says
# so: EXTERNALSRC = "", SRC_URI and SRCREV.
inherit cmake pkgconfig externalsrc
EXTERNALSRC ?= "${@os.path.realpath(os.path.join(d.getVar('THISDIR'), *['..'] * 5))}"

# Riscv64 needs a compiler with vector intrinsics (gcc 14, clang 16): plain kernels before.
PACKAGECONFIG ??= ""
PACKAGECONFIG[plain] = "-DGEM_BASE_ONLY=ON,-DGEM_BASE_ONLY=OFF"
EXTRA_OECMAKE += "-DCMAKE_BUILD_TYPE=Release"

PACKAGES =+ "lib${BPN}"
FILES:lib${BPN} = "${libdir}/libgemrun.so.*"
RDEPENDS:${PN}-dev += "${PN}-staticdev"
