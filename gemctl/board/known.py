"""Names of a device tree, and the board (id, arch) that each stands for, of hdf/. Made by
tools/boards.py; do not change it by hand."""

from __future__ import annotations

BOARDS: dict[str, tuple[str, str]] = {
    "fsl,imx8mm": ("imx8m-mini", "aarch64"),
    "nvidia,p3668-0000": ("jetson-xavier-nx", "aarch64"),
    "nvidia,p3668-0001": ("jetson-xavier-nx", "aarch64"),
    "nvidia,p3701-0004": ("agx-orin-32gb", "aarch64"),
    "nvidia,p3701-0005": ("agx-orin-64gb", "aarch64"),
    "nvidia,p3767-0000": ("orin-nx-16gb", "aarch64"),
    "nvidia,p3767-0001": ("orin-nx-8gb", "aarch64"),
    "nvidia,p3767-0003": ("jetson-orin-nano", "aarch64"),
    "nvidia,p3767-0004": ("orin-nano-4gb-s", "aarch64"),
    "nvidia,p3767-0005": ("jetson-orin-nano", "aarch64"),
    "raspberrypi,4-model-b": ("raspberry-pi-4", "aarch64"),
    "raspberrypi,5-model-b": ("raspberry-pi-5", "aarch64"),
    "rockchip,rk3566": ("rk3566", "aarch64"),
    "rockchip,rk3588": ("rk3588-8gb", "aarch64"),
    "rockchip,rk3588s": ("rk3588-8gb", "aarch64"),
    "spacemit,k1": ("spacemit-k1", "riscv64"),
    "st,stm32mp257": ("stm32mp257", "aarch64"),
    "starfive,jh7110": ("starfive-jh7110", "riscv64"),
}
