/* gs_boards.h: names of a device tree and the board that each stands for, of hdf/. Made by
 * tools/boards.py; do not change it by hand. */
#ifndef GS_BOARDS_H
#define GS_BOARDS_H

#include "gembin.h"

static const struct {
    const char *compatible, *id;
    unsigned isa;
} gs_boards[] = {
    {"fsl,imx8mm", "imx8m-mini", GB_ISA_AARCH64},
    {"nvidia,p3668-0000", "jetson-xavier-nx", GB_ISA_AARCH64},
    {"nvidia,p3668-0001", "jetson-xavier-nx", GB_ISA_AARCH64},
    {"nvidia,p3701-0004", "agx-orin-32gb", GB_ISA_AARCH64},
    {"nvidia,p3701-0005", "agx-orin-64gb", GB_ISA_AARCH64},
    {"nvidia,p3767-0000", "orin-nx-16gb", GB_ISA_AARCH64},
    {"nvidia,p3767-0001", "orin-nx-8gb", GB_ISA_AARCH64},
    {"nvidia,p3767-0003", "jetson-orin-nano", GB_ISA_AARCH64},
    {"nvidia,p3767-0004", "orin-nano-4gb-s", GB_ISA_AARCH64},
    {"nvidia,p3767-0005", "jetson-orin-nano", GB_ISA_AARCH64},
    {"raspberrypi,4-model-b", "raspberry-pi-4", GB_ISA_AARCH64},
    {"raspberrypi,5-model-b", "raspberry-pi-5", GB_ISA_AARCH64},
    {"rockchip,rk3566", "rk3566", GB_ISA_AARCH64},
    {"rockchip,rk3588", "rk3588-8gb", GB_ISA_AARCH64},
    {"rockchip,rk3588s", "rk3588-8gb", GB_ISA_AARCH64},
    {"spacemit,k1", "spacemit-k1", GB_ISA_RISCV64},
    {"st,stm32mp257", "stm32mp257", GB_ISA_AARCH64},
    {"starfive,jh7110", "starfive-jh7110", GB_ISA_RISCV64},
};

#endif
