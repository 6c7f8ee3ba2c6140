"""The shipped boards: their names, hashes that artifacts bind to, and what is known of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemmake import hdf
from gemmake.errors import TargetError

# File -> (id, hash without policy). A changed hash turns artifacts of that board away: change a
# line here only where that is meant.
BOARDS = {
    "core-i5-industrial": (
        "core-i5",
        "f0279b7d0970c165634b06600d1d9b995cfafa21fd9ae4c5a7fddbbe4811e04a",
    ),
    "cortex-m55": (
        "cortex-m55",
        "4d95fbb30bfecc19c30c9301250d3c46c79a77e5e3833147e7eed6752e35b9b6",
    ),
    "cortex-m7": (
        "cortex-m7",
        "7f2928fc24cda0bccc7332d6c257d3bc1b6e6328b070bc6751f3e5abf60937c0",
    ),
    "generic-aarch64": (
        "generic-aarch64",
        "00f479cad1b4cd1c1286fd5d211ec01ef3b62fd00415d975d1a2e4adf6f60cf3",
    ),
    "generic-armv7": (
        "generic-armv7",
        "43387f5ade50c8875c973ed6a26b44c025ffa960ac063d0a2ff5c5184b2133cb",
    ),
    "generic-riscv64": (
        "generic-riscv64",
        "041430bdd738f25371141311a7ebfc04e381328332e85758dd9c9c3a53702f94",
    ),
    "generic-x86-64": (
        "generic-x86-64",
        "4443fb941b3cf5abd5c246ba320e4636a7683f4f5b6048421ba0a593889a08fe",
    ),
    "generic-x86-64-v3": (
        "generic-x86-v3",
        "46e0976d60b94dd6b1721ec2f6367d9e4ea09c618cf059862e225220643e49d0",
    ),
    "generic-x86-64-v4": (
        "generic-x86-v4",
        "386224df0320174a117fa9b5250c2f9e208ab26d53e2aac93bef9fdb8f5d307b",
    ),
    "imx8m-mini": (
        "imx8m-mini",
        "070ebabced19496a5bb9fbd96a1bdb90cc8e4a388f700e5506e63311dcb0e55e",
    ),
    "intel-n100": (
        "intel-n100",
        "79be3fcbcfa90a67372006bd9ef7ce78a5d77f86e45fcd6903c282254a17748e",
    ),
    "jetson-agx-orin-32gb": (
        "agx-orin-32gb",
        "7814ddc04469e6c188e3bed851e39d8e04409e7e27f49f1f486ec10f1ed2b949",
    ),
    "jetson-agx-orin-64gb": (
        "agx-orin-64gb",
        "ca86de2ddad22f59814c514f31ac7cae90b045b4fa9878020e50b1089fa2fcf0",
    ),
    "jetson-orin-nano": (
        "jetson-orin-nano",
        "c3aa14e32057095317b473f56b565d981f8e571cfa1e7c7432cbdd9f2537ef2e",
    ),
    "jetson-orin-nano-4gb": (
        "orin-nano-4gb",
        "99afe17ae5d59ff6220aef85620c07c6e3d50a2938fb530b3bfa0a4025e03552",
    ),
    "jetson-orin-nano-4gb-super": (
        "orin-nano-4gb-s",
        "4debc25a2dc7af0613b636cbe2654d2e3045ead828281fd51ef4974d3e756c70",
    ),
    "jetson-orin-nano-classic": (
        "orin-nano-15w",
        "ea18a61427d77a06faac79d1fda52fbfaa7e46f88f4c303c86bee66de5573c9c",
    ),
    "jetson-orin-nano-super": (
        "orin-nano-super",
        "3ee0e1783b8bc8213c2e028ffd660d97864527a07c9587817a79268aa393b32b",
    ),
    "jetson-orin-nx-16gb": (
        "orin-nx-16gb",
        "ed3c8fb2f57efb2befdb986c2bd51ea0d103cc42302a145da77e78282b2b5242",
    ),
    "jetson-orin-nx-8gb": (
        "orin-nx-8gb",
        "1092933379d814e2e3706568ecd41773c654d691c427804f3b268be77c7e4311",
    ),
    "jetson-xavier-nx": (
        "jetson-xavier-nx",
        "df92be2dfb851fe0902167799b81020ac7837d42f35f84111dd4a26aeeddefa2",
    ),
    "meter-256mb": (
        "meter-256mb",
        "c275500a550e116be3559a102e5a162f16b88995fbd6ea34eae276578caef93a",
    ),
    "raspberry-pi-4": (
        "raspberry-pi-4",
        "c83ea8c41301b50dbcacef2cfe10f8e9e46d951608ac94840f7b5674ced46c78",
    ),
    "raspberry-pi-5": (
        "raspberry-pi-5",
        "1e97e3ef328403db2548700cfaed4bac06a36c94bff88fe412a388a763cb3c46",
    ),
    "rk3566": (
        "rk3566",
        "6779bc6ba7b99a0664a829d725b43d964237ff4d646f3cd53f4f27c39ac20e61",
    ),
    "rk3588-16gb": (
        "rk3588-16gb",
        "ec668d194f432bea60571584e1d9198d52144146697c025a62e7304b8d12d30e",
    ),
    "rk3588-8gb": (
        "rk3588-8gb",
        "f3e8fbda135526968df3b700d8102d9a3cf8c5c32885acc31cf8a95008ca5341",
    ),
    "spacemit-k1": (
        "spacemit-k1",
        "41e63f705c2eedac1a47fb78de767fb104dbb362f9a524ffb5a15fd8e9aea51a",
    ),
    "starfive-jh7110": (
        "starfive-jh7110",
        "fd0bd0c990da971398ecfc8ee4deb80cb93261afbfec103ab689f8178991f02b",
    ),
    "stm32mp257": (
        "stm32mp257",
        "220fe262eb9c65dc05dc1c89f6eea52f7140894c1fa9eb8a9448578dd6bb4656",
    ),
}


def test_the_table_has_every_board() -> None:
    assert tuple(BOARDS) == hdf.list_targets()


@pytest.mark.parametrize("name", BOARDS)
def test_id_and_hash_stay(name: str) -> None:
    board = hdf.load_hdf(name)
    assert (board.id, board.sha256().hex()) == BOARDS[name]
    assert hdf.canonical_sha256(board.canonical_json()) == board.sha256()


def test_ids_differ_and_name_the_board_too() -> None:
    ids = [identity for identity, _ in BOARDS.values()]
    assert len(set(ids)) == len(ids)
    assert all(hdf.load_hdf(identity).id == identity for identity in ids)


@pytest.mark.parametrize("name", BOARDS)
def test_the_readme_lists_the_board(name: str) -> None:
    readme = (hdf.data_dir() / "README.md").read_text(encoding="utf-8")
    row = next(line for line in readme.splitlines() if line.startswith(f"| `{name}` |"))
    for field in hdf.load_hdf(name).unverified():
        assert f"`{field}`" in row


@pytest.mark.parametrize("name", hdf.list_targets())
def test_instruction_sets_have_a_source(name: str) -> None:
    """They are no numbers, and a board may be said to have what nobody looked up all the same."""
    board = hdf.load_hdf(name)
    if board.target.features and not board.generic and board.target.os == "linux":
        assert board.origin("target.features") is not None


@pytest.mark.parametrize("name", [name for name in hdf.list_targets() if "jetson" in name])
def test_modes_of_a_jetson_say_cores_and_clocks(name: str) -> None:
    """Without them a speed is that of a clock that the mode does not have."""
    board = hdf.load_hdf(name)
    for mode in board.power_mode:
        assert mode.cores_online is not None, mode.id
        assert mode.cpu_max_mhz is not None or mode.id.startswith("MAXN"), mode.id


def test_facts_of_some_boards() -> None:
    peak = {
        name: mode.mem_peak_gbps for name in BOARDS if (mode := hdf.load_hdf(name).default_mode)
    }
    assert peak["jetson-orin-nano-4gb"] == 34.1
    assert peak["jetson-orin-nano-classic"] == 68.3
    assert peak["jetson-agx-orin-64gb"] == 204.8
    assert peak["raspberry-pi-5"] == 17.1
    dla = {name: hdf.load_hdf(name).accelerators("nvdla") for name in BOARDS}
    assert (dla["jetson-orin-nx-8gb"], dla["jetson-orin-nx-16gb"]) == (1, 2)
    assert dla["jetson-orin-nano-4gb-super"] == 0
    nano, kit = hdf.load_hdf("jetson-orin-nano"), hdf.load_hdf("jetson-orin-nano-super")
    assert nano.power_mode == kit.power_mode


@pytest.mark.parametrize("name", ["cortex-m55", "cortex-m7"])
def test_a_microcontroller_has_a_budget_of_ram_alone(name: str) -> None:
    """The total that an artifact declares holds its weights, which stay in flash there."""
    board = hdf.load_hdf(name)
    assert board.bare
    assert board.memory is not None
    assert 0 == board.budget_bytes() < board.ram_bytes() <= board.memory.visible_mib * hdf.MIB


def test_boards_with_a_system_have_one_budget() -> None:
    for name in BOARDS:
        board = hdf.load_hdf(name)
        assert board.bare == name.startswith("cortex-m")
        assert board.bare or board.budget_bytes() == board.ram_bytes()


def changed(folder: Path, base: str, text: str) -> str:
    path = folder / "own.toml"
    path.write_text(f'inherits = ["{base}"]\n{text}', encoding="utf-8")
    with pytest.raises(TargetError) as caught:
        hdf.load_hdf(path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("base", "text", "words"),
    [
        (
            "jetson-orin-nano",
            '[[power_mode]]\nid = "25W"\ncpu_max_mhz = 1900\n',
            "cpu_max_mhz 1900 exceeds max_freq_mhz 1728",
        ),
        (
            "jetson-orin-nano",
            '[[power_mode]]\nid = "25W"\ngpu_max_mhz = 1900\n',
            "gpu_max_mhz 1900 exceeds max_freq_mhz 1020",
        ),
        (
            "rk3588-8gb",
            '[[power_mode]]\nid = "fixed"\nmem_peak_gbps = 44.0\n',
            "more than 10 %",
        ),
        (
            "rk3588-8gb",
            "[memory]\nsize_mib = 16384\nvisible_mib = 14336\n",
            "is not the 8192 of the name rk3588-8gb",
        ),
        (
            "meter-256mb",
            "[memory]\nsize_mib = 512\nvisible_mib = 448\n",
            "is not the 256 of the name",
        ),
        ("raspberry-pi-4", '[target]\nfeatures = ["dotprod"]\n', "cortex-a72 has no dotprod"),
        ("starfive-jh7110", '[target]\nfeatures = ["v"]\n', "sifive-u74 has no v"),
        ("intel-n100", '[target]\nfeatures = ["avx512f"]\n', "gracemont has no avx512f"),
        ("cortex-m7", '[target]\nfeatures = ["mve"]\n', "cortex-m7 has no mve"),
    ],
)
def test_contradictions(tmp_path: Path, base: str, text: str, words: str) -> None:
    assert words in changed(tmp_path, base, text)
