"""Hardware description files: schema, inheritance, hash, and the surprises of configuration."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gemmake import hdf
from gemmake.errors import TargetError

MINIMAL = """
hdf_version = "1.0"
id = "bench"
board = "bench"
[target]
arch = "aarch64"
[[cpu.cluster]]
id = "c0"
cores = [0, 1]
l2_kib = 512
[memory]
size_mib = 1000
visible_mib = 900
bus_bits = 64
"""


def write(folder: Path, text: str, name: str = "bench.toml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def refused(folder: Path, text: str) -> str:
    with pytest.raises(TargetError) as caught:
        hdf.load_hdf(write(folder, text))
    message = str(caught.value)
    assert message.count("\n") == 0
    return message


@pytest.mark.parametrize("name", hdf.list_targets())
def test_shipped_files_are_valid_and_every_number_has_a_source(name: str) -> None:
    board = hdf.load_hdf(name)
    assert board.id == name or len(name) > hdf.NAME_BYTES
    assert len(board.id.encode()) <= hdf.NAME_BYTES
    assert board.unsourced() == ()


def test_shipped_boards() -> None:
    readme = (hdf.data_dir() / "README.md").read_text(encoding="utf-8")
    for name in hdf.list_targets():
        board = hdf.load_hdf(name)
        assert board.generic == name.startswith("generic-")
        for field in board.unverified():
            assert f"`{field}`" in readme, f"{name}: {field} is not listed as unverified"


def test_orin_nano_facts() -> None:
    board = hdf.load_hdf("jetson-orin-nano")
    assert board.accelerators("nvdla") == 0
    assert board.accelerators("cuda") == 1
    assert board.board == "orin-nano"
    assert board.budget_bytes() == 4768 << 20
    assert board.default_mode is not None
    assert board.default_mode.mem_peak_gbps == 102.4
    assert board.policy.target_temp_c == 70.0
    assert board.throttle_c == 80.0
    assert board.thermal is not None
    assert board.thermal.zones[0] == "tj-thermal"
    gpu = next(unit for unit in board.accelerator if unit.id == "gpu")
    assert (gpu.sm, gpu.cores) == ("8.7", 1024)  # one from the base, one from the board


def test_generic_budget_is_left_to_the_device() -> None:
    assert hdf.load_hdf("generic-x86-64").budget_bytes() == 0


def test_budget_is_the_smaller_of_share_and_rest(tmp_path: Path) -> None:
    board = hdf.load_hdf(write(tmp_path, MINIMAL))
    assert board.budget_bytes() == 585 << 20  # 65 % of 900, below 900 - 256
    small = MINIMAL + "[policy]\nreserve_mib = 500\n"
    assert hdf.load_hdf(write(tmp_path, small)).budget_bytes() == 400 << 20


def test_policy_and_sources_do_not_change_the_hash(tmp_path: Path) -> None:
    plain = hdf.load_hdf(write(tmp_path, MINIMAL))
    policy = hdf.load_hdf(write(tmp_path, MINIMAL + "[policy]\nthrottle_temp_c = 60.0\n"))
    source = '[[source]]\nfield = "memory"\nref = "x"\nkind = "measured"\nverified = true\n'
    sourced = hdf.load_hdf(write(tmp_path, MINIMAL + source))
    other = hdf.load_hdf(write(tmp_path, MINIMAL.replace("900", "901")))
    assert plain.sha256() == policy.sha256() == sourced.sha256() != other.sha256()
    assert plain.canonical_json() == sourced.canonical_json() != policy.canonical_json()
    assert hdf.canonical_sha256(policy.canonical_json()) == plain.sha256()


def test_canonical_form_is_independent_of_the_writing(tmp_path: Path) -> None:
    lines = MINIMAL.replace("visible_mib = 900", "visible_mib = 0x384  # hexadecimal")
    assert hdf.load_hdf(write(tmp_path, lines)) == hdf.load_hdf(write(tmp_path, MINIMAL))
    stored = hdf.load_hdf("jetson-orin-nano").canonical_json()
    again = json.dumps(
        json.loads(stored), sort_keys=True, separators=(",", ":"), ensure_ascii=False
    )
    assert again.encode() == stored


def test_description_is_frozen() -> None:
    board = hdf.load_hdf("generic-x86-64")
    with pytest.raises(ValueError, match="frozen"):
        board.id = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cores = 010", "not valid TOML"),
        ("npu = NO", "not valid TOML"),
        ("size_mib = 1e3", "memory.size_mib"),
        ("size_mib = 12:30", "not valid TOML"),
        ('size_mib = "1000"', "memory.size_mib"),
        ("size_mib = true", "memory.size_mib"),
        ("size_mib = 0", "memory.size_mib"),
        ("size_mib = " + "9" * 5000, "not valid TOML: Exceeds the limit"),
        ("size_mib = -5", "memory.size_mib"),
        ("size_mib = 99999999999999999999", "memory.size_mib"),
        ("size_mib = 1000\nsize_mib = 2000", "not valid TOML"),
        ("sise_mib = 1000", "did you mean size_mib?"),
        ("size = 1000", "did you mean size_mib?"),
        ("ram = 1000", "memory.ram: unknown key"),
        (
            "size_mib = 1979-05-27",
            "memory.size_mib: 1979-05-27 is no value of an HDF; use plain numbers and text (line ",
        ),
    ],
)
def test_yaml_surprises_are_refused(tmp_path: Path, text: str, words: str) -> None:
    message = refused(tmp_path, MINIMAL.replace("size_mib = 1000", text))
    assert words in message
    assert "bench.toml: " in message


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('hdf_version = "1.0"', 'hdf_version = "2.0"', "this tool reads 1.x"),
        ('hdf_version = "1.0"', "hdf_version = 1.0", "hdf_version"),
        ('id = "bench"', 'id = "a-name-of-17-byte"', "id"),
        ('id = "bench"', 'id = "Bench"', "id"),
        ('id = "bench"\n', "", "id: missing"),
        ('arch = "aarch64"', 'arch = "mips"', "target.arch"),
        ('arch = "aarch64"', 'arch = "aarch64"\nfeatures = ["avx2"]', "unknown feature 'avx2'"),
        ("l2_kib = 512", "l2_kib = 512\nl3_kib = 256", "l3_kib 256 is smaller"),
        ("cores = [0, 1]", "cores = [0, 0]", "a core stands in two clusters"),
        ("visible_mib = 900", "visible_mib = 1001", "exceeds size_mib"),
        ("visible_mib = 900", "", "memory.visible_mib: missing"),
        ("bus_bits = 64", "bus_bits = nan", "memory.bus_bits: nan is no value of an HDF"),
        ("cores = [0, 1]", "cores = [0, inf]", "cpu.cluster[c0].cores"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert old in MINIMAL
    assert words in refused(tmp_path, MINIMAL.replace(old, new))


MODE = '[[power_mode]]\nid = "a"\ncores_online = 2\ncpu_max_mhz = 1000\nmem_mtps = 4000\n'


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (MODE + "mem_peak_gbps = 32.0\n", "exactly one mode"),
        (MODE + "mem_peak_gbps = 40.0\ndefault = true\n", "more than 10 %"),
        (
            MODE.replace("= 2", "= 3") + "mem_peak_gbps = 32.0\ndefault = true\n",
            "cores_online 3 of 2 cores",
        ),
        ("[thermal]\nhw_passive_c = 95\nhw_critical_c = 90\n", "exceeds hw_critical_c"),
        (
            "[thermal]\nhw_passive_c = 80\nhw_critical_c = 90\n[policy]\nthrottle_temp_c = 80\n",
            "is not below",
        ),
        ("[policy]\ntarget_temp_c = 80\nthrottle_temp_c = 70\n", "exceeds throttle_temp_c"),
        ("[policy]\nthreads = 0\n", "policy.threads"),
        ("[policy]\nreserve_mib = 900\n", "leaves nothing of memory.visible_mib 900; lower it ("),
        ("[policy]\nram_fraction = 1.5\n", "policy.ram_fraction"),
    ],
)
def test_modes_temperatures_and_policy(tmp_path: Path, extra: str, words: str) -> None:
    assert words in refused(tmp_path, MINIMAL + extra)


@pytest.mark.parametrize(
    ("table", "key", "value", "told"),
    [
        ("policy", "ram_fraction", "1e-300", "greater than or equal to 0.01, not 1e-300"),
        ("policy", "ram_fraction", "5e-324", "greater than or equal to 0.01, not 5e-324"),
        ("policy", "ram_fraction", "0.009", "greater than or equal to 0.01, not 0.009"),
        ("isp", "max_freq_mhz", "5e-324", "greater than or equal to 0.001, not 5e-324"),
        ("isp", "max_freq_mhz", "1e12", "less than or equal to 1000000, not 1000000000000.0"),
    ],
)
def test_quantities_that_no_board_has_are_named_with_file_field_and_line(
    tmp_path: Path, table: str, key: str, value: str, told: str
) -> None:
    text = f"{MINIMAL}[{table}]\n{key} = {value}\n"
    line = text.splitlines().index(f"{key} = {value}") + 1
    message = refused(tmp_path, text)
    assert message.startswith(f"{tmp_path}/bench.toml: {table}.{key}: input should be {told}")
    assert message.endswith(f"; correct the value (line {line})")


def test_every_number_of_the_schema_has_bounds() -> None:
    """Integers and floats alike, wherever they stand: none may be as small as 5e-324."""
    for name, table in {"Hdf": hdf.export_schema(), **hdf.export_schema()["$defs"]}.items():
        for key, field in table["properties"].items():
            for kind in (field, *field.get("anyOf", ()), field.get("items", {})):
                if kind.get("type") in ("integer", "number"):
                    low, high = ({f"{end}imum", f"exclusive{end.title()}imum"} & {*kind}
                                 for end in ("min", "max"))  # fmt: skip
                    assert low, (name, key)
                    assert high, (name, key)
                    assert kind["type"] == "integer" or "minimum" in kind, (name, key)


def test_a_share_of_less_than_a_mib_is_not_called_a_reserve(tmp_path: Path) -> None:
    small = MINIMAL.replace("1000", "64").replace("900", "60")
    message = refused(tmp_path, small + "[policy]\nram_fraction = 0.01\nreserve_mib = 4\n")
    assert "policy.ram_fraction 0.01 of memory.visible_mib 60 is less than 1 MiB; raise it (" in (
        message
    )


def test_all_keys_that_are_missing_are_named_at_once(tmp_path: Path) -> None:
    message = refused(tmp_path, '[target]\nos = "linux"\n[memory]\nbus_bits = 64\n')
    told = "hdf_version, id, board, target.arch, cpu, memory.size_mib, memory.visible_mib: missing"
    assert f"bench.toml: {told}; add them (hdf/README.md" in message
    assert "id: missing; add it (" in refused(tmp_path, MINIMAL.replace('id = "bench"\n', ""))


def test_inheritance_merges_deeply(tmp_path: Path) -> None:
    write(tmp_path, MINIMAL, "soc/base.toml")
    over = 'inherits = ["soc/base"]\n[memory]\nvisible_mib = 800\n[[cpu.cluster]]\nid = "c0"\n'
    over += 'l2_kib = 1024\n[[cpu.cluster]]\nid = "c1"\ncores = [2]\n'
    board = hdf.load_hdf(write(tmp_path, over))
    assert board.memory is not None
    assert (board.memory.size_mib, board.memory.visible_mib) == (1000, 800)
    assert [cluster.cores for cluster in board.cpu.cluster] == [(0, 1), (2,)]
    assert board.cpu.cluster[0].l2_kib == 1024


def test_own_file_may_build_on_a_shipped_one(tmp_path: Path) -> None:
    text = 'inherits = ["jetson-orin-nano"]\nid = "agv-7"\n[memory]\nvisible_mib = 7000\n'
    board = hdf.load_hdf(write(tmp_path, text))
    assert (board.id, board.board) == ("agv-7", "orin-nano")


def test_circles_and_long_chains_are_refused(tmp_path: Path) -> None:
    write(tmp_path, 'inherits = ["b"]', "a.toml")
    write(tmp_path, 'inherits = ["a"]', "b.toml")
    with pytest.raises(TargetError) as caught:
        hdf.load_hdf(tmp_path / "a.toml")
    told = f"{tmp_path}/b.toml: inherits: a.toml -> b.toml -> a.toml is a circle; remove the circle"
    assert str(caught.value) == f"{told} (line 1)"
    for depth in range(hdf.MAX_DEPTH):
        write(tmp_path, f'inherits = ["d{depth + 1}"]', f"d{depth}.toml")
    write(tmp_path, MINIMAL, f"d{hdf.MAX_DEPTH}.toml")
    with pytest.raises(
        TargetError, match=r"d3\.toml: inherits: more than 4 files deep.*\(line 1\)"
    ):
        hdf.load_hdf(tmp_path / "d0.toml")
    hdf.load_hdf(tmp_path / "d1.toml")  # one file fewer


@pytest.mark.parametrize("name", ["../up", "/etc/x", "a/../../b", "", ".hidden", "A"])
def test_bases_stay_inside(tmp_path: Path, name: str) -> None:
    assert "is not a name" in refused(tmp_path, f"inherits = [{json.dumps(name)}]\n" + MINIMAL)


def test_many_bases_and_loops_of_links_are_refused(tmp_path: Path) -> None:
    """In no time, whatever a file makes of the others."""
    write(tmp_path, "inherits = [" + '"c", ' * 300 + "]", "b.toml")
    write(tmp_path, "[policy]\nreserve_mib = 5\n", "c.toml")
    told = refused(tmp_path, "inherits = [" + '"b", ' * 300 + "]")
    assert "b.toml: inherits: more than 32 files in all" in told
    assert told.endswith("(line 1)")
    (tmp_path / "l.toml").symlink_to("m.toml")
    (tmp_path / "m.toml").symlink_to("l.toml")
    with pytest.raises(TargetError, match="symbolic links"):
        hdf.load_hdf(tmp_path / "l.toml")


def test_an_entry_twice_in_one_file_is_refused_with_a_base_too(tmp_path: Path) -> None:
    write(tmp_path, MINIMAL + MODE + "default = true\n", "soc/base.toml")
    text = 'inherits = ["soc/base"]\n' + '[[power_mode]]\nid = "a"\ntdp_w = 9\n' * 2
    assert "power_mode: a name occurs twice" in refused(tmp_path, text)


def test_the_line_of_a_mistake_is_not_looked_for_without_end(tmp_path: Path) -> None:
    """What is parsed for it is bounded: a message may do without the line."""
    many = "".join(
        f'[[source]]\nfield = "x{n}"\nref = "r"\nkind = "measured"\n' for n in range(1500)
    )
    for end in ("size_mib = [" + "\n" * 900 + "]\n", "# size_mib\n" * 64 + "size_mib = -1\n"):
        text = MINIMAL.replace("[memory]\nsize_mib = 1000\n", f"{many}[memory]\n{end}", 1)
        assert "memory.size_mib: " in refused(tmp_path, text)


def test_bases_must_exist_and_be_a_list(tmp_path: Path) -> None:
    assert refused(tmp_path, 'inherits = ["soc/none"]\n').endswith("beside the file (line 1)")
    text = '# a board\ninherits = "soc/tegra234"\n'
    assert refused(tmp_path, text).endswith("write inherits = [..] (line 2)")


def test_unknown_target_names_the_known_ones() -> None:
    with pytest.raises(TargetError, match=r"did you mean jetson-orin-nano\?.*generic-x86-64"):
        hdf.load_hdf("jetson-orin-nona")
    with pytest.raises(TargetError, match="known targets"):
        hdf.load_hdf("soc")


def test_paths_are_bytes_end_to_end(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + "/模型 ü".encode() + b"\xff"
    os.mkdir(folder)  # noqa: PTH102  a name that is not UTF-8
    path = os.fsdecode(folder + b"/board.toml")
    with open(path, "w", encoding="utf-8") as stream:  # noqa: PTH123
        stream.write(MINIMAL)
    assert hdf.load_hdf(path).id == "bench"
    with open(path, "a", encoding="utf-8") as stream:  # noqa: PTH123
        stream.write("wrong = 1\n")
    with pytest.raises(TargetError) as caught:
        hdf.load_hdf(path)
    assert "模型 ü\ufffd" in str(caught.value)
    str(caught.value).encode("utf-8")  # can be printed


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="check the path"):
        hdf.load_hdf(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b'id = "\xff"')
    with pytest.raises(TargetError, match="byte 6 is not UTF-8"):
        hdf.load_hdf(tmp_path / "latin.toml")
    (tmp_path / "big.toml").write_bytes(b"#" * (hdf.MAX_BYTES + 1))
    with pytest.raises(TargetError, match="larger than"):
        hdf.load_hdf(tmp_path / "big.toml")


def test_schema_for_editors() -> None:
    schema = hdf.export_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["additionalProperties"] is False
    assert {"inherits", "id", "policy", "power_mode"} <= set(schema["properties"])
    assert "required" not in schema
    assert json.loads(json.dumps(schema)) == schema


# Operating points.


def points(mhz: str, volts: str) -> str:
    return MINIMAL.replace("l2_kib = 512", f"l2_kib = 512\nopp_mhz = {mhz}\nopp_volts = {volts}")


def test_operating_points_are_optional_and_belong_to_the_hash(tmp_path: Path) -> None:
    bare = hdf.load_hdf(write(tmp_path, MINIMAL))
    assert b"opp_" not in bare.canonical_json()  # what was compiled before keeps its hash
    curve = hdf.load_hdf(write(tmp_path, points("[600, 1200]", "[0.7, 0.9]")))
    stored = json.loads(curve.canonical_json())["cpu"]["cluster"][0]
    assert (stored["opp_mhz"], stored["opp_volts"]) == ([600.0, 1200.0], [0.7, 0.9])
    assert curve.sha256() != bare.sha256()
    assert "cpu.cluster[c0].opp_volts" in curve.unsourced()


@pytest.mark.parametrize(
    ("mhz", "volts", "sentence"),
    [
        ("[600, 1200]", "[0.7]", "opp_mhz has 2 entries, opp_volts 1; list 2 to 32 of each"),
        ("[600]", "[0.7]", "opp_mhz has 1 entries, opp_volts 1; list 2 to 32 of each"),
        (str(list(range(1, 34))), str([0.7] * 33), "opp_mhz has 33 entries, opp_volts 33"),
        ("[1200, 600]", "[0.7, 0.9]", "opp_mhz does not ascend; sort the operating points"),
        ("[600, 600]", "[0.7, 0.9]", "opp_mhz does not ascend"),
        ("[600, 1200]", "[0.9, 0.7]", "opp_volts falls as the clock rises"),
        ("[600, 1200]", "[700, 900]", "less than or equal to 2, not 700"),
        ("[600, 1200]", "[0.1, 0.9]", "greater than or equal to 0.2, not 0.1"),
        ("[0, 1200]", "[0.7, 0.9]", "greater than or equal to 0.001, not 0"),
        ("[600, 1200]\nmax_freq_mhz = 1500", "[0.7, 0.9]",
         "opp_mhz ends at 1200, max_freq_mhz is 1500; add the highest point"),
    ],
)  # fmt: skip
def test_operating_points_that_cannot_be(
    mhz: str, volts: str, sentence: str, tmp_path: Path
) -> None:
    message = refused(tmp_path, points(mhz, volts))
    assert sentence in message
    assert "cpu.cluster[c0]" in message


def test_half_a_curve_is_refused(tmp_path: Path) -> None:
    text = MINIMAL.replace("l2_kib = 512", "opp_mhz = [600, 1200]")
    assert "opp_mhz has 2 entries, opp_volts 0" in refused(tmp_path, text)


def test_a_slower_chip_of_a_described_kind_keeps_its_curve(tmp_path: Path) -> None:
    text = points("[600, 1200]\nmax_freq_mhz = 1100", "[0.7, 0.9]")
    assert hdf.load_hdf(write(tmp_path, text)).cpu.cluster[0].max_freq_mhz == 1100.0


def test_the_schema_for_editors_knows_operating_points() -> None:
    cluster = hdf.export_schema()["$defs"]["Cluster"]["properties"]
    assert {"opp_mhz", "opp_volts"} <= set(cluster)


def test_another_size_of_memory_says_what_the_kernel_sees(tmp_path: Path) -> None:
    """The base's figure is of the base's size."""
    write(tmp_path, MINIMAL, "base.toml")
    head = 'hdf_version = "1.0"\ninherits = ["base"]\nid = "mine"\n[memory]\n'
    text = refused(tmp_path, head + "size_mib = 2000\n")
    assert "mine" in text or "bench.toml" in text
    assert "memory.visible_mib 900 is of the base's size; set it too, 1750 where" in text
    assert "(line 5)" in text
    for own in ("size_mib = 1000\n", "bus_bits = 32\n", "size_mib = 2000\nvisible_mib = 1800\n"):
        found = hdf.load_hdf(write(tmp_path, head + own))
        assert found.memory is not None
        assert found.memory.visible_mib == (1800 if "1800" in own else 900)
