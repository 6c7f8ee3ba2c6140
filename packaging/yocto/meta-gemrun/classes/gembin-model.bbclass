# gembin-model.bbclass: a recipe that puts a compiled model into the image.
#
#   SUMMARY = "The answers of line 3"
#   LICENSE = "CLOSED"
#   GEMBIN = "${THISDIR}/files/model.gembin"
#   inherit gembin-model
#
# The artifact is compiled before (gemmake needs the checkpoint and minutes); it is installed into
# GEMBIN_DIR as it is: stripped of nothing, so that its signature and checksums hold.
GEMBIN_DIR ??= "${datadir}/gembin"

inherit allarch
INHIBIT_DEFAULT_DEPS = "1"
INHIBIT_PACKAGE_STRIP = "1"
FILES:${PN} += "${GEMBIN_DIR}"

do_configure[noexec] = "1"
do_compile[noexec] = "1"
do_install[file-checksums] += "${GEMBIN}:True"

do_install() {
    if [ "$(head -c 4 "${GEMBIN}" | od -An -tx1 | tr -d ' ')" != 8b47454d ]; then
        bbfatal "${GEMBIN}: no .gembin; compile it with gemmake"
    fi
    install -d "${D}${GEMBIN_DIR}"
    install -m 0644 "${GEMBIN}" "${D}${GEMBIN_DIR}/"
}
