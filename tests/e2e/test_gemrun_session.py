"""gemrun --session: a text and a conversation that go on from process to process."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import tiny
from gemrun import GemRunContext

SIZE = ("--kv-cache-size", "320")
OPTIONS = ("--temperature", "0.9", "--seed", "3", "--ignore-eos", "--json")
SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 3}
Make = Callable[..., Path]


@pytest.fixture(scope="module")
def path(tiny_checkpoint: Make, artifact_cache: Make) -> Path:
    """A random Qwen3 with a chat template."""
    return artifact_cache(tiny_checkpoint("qwen3"), *SIZE)


def call(
    command: Path, *arguments: str | Path, stdin: str = "", cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(a) for a in (command, *arguments)],
        input=stdin, capture_output=True, text=True, errors="replace", timeout=60, check=False,
        cwd=cwd,
    )  # fmt: skip


def answer(command: Path, *arguments: str | Path, stdin: str = "") -> dict[str, Any]:
    """The figures of the last answer of a run that went well."""
    done = call(command, *arguments, *OPTIONS, stdin=stdin)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def by_hand(ctx: GemRunContext, ids: Sequence[int], count: int, **settings: Any) -> list[int]:
    """What follows these ids, from an empty cache."""
    ctx.reset_kv_cache()
    ctx.prefill(ids)
    found = []
    for _ in range(count):
        found.append(ctx.sample(**(settings or SAMPLED)))
        ctx.decode(found[-1])
    return found


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_raw_text_goes_on(
    gemrun_cli: Path, tiny_checkpoint: Make, artifact_cache: Make, tmp_path: Path, family: str
) -> None:
    """Also behind an answer that was cut, whose last token is not lost, and from its end."""
    model = artifact_cache(tiny_checkpoint(family), *SIZE)
    session = tmp_path / "s"
    with GemRunContext(model, ignore_memory=True) as ctx:
        ids: list[int] = []
        for turn, text in enumerate(("The conveyor stops", " when the door", "", ", and then")):
            size = ("--max-tokens", str(5 + turn), "--threads", str(1 + turn % 2))
            said = answer(gemrun_cli, model, "--session", session, "--prompt", text, *size)
            new = ctx.tokenize(text, bos=not ids, control=True)
            assert said["prompt_tokens"] == len(ids) + len(new)
            assert said["reused"] == max(0, len(ids) - (not new))
            ids += new
            assert said["tokens"] == by_hand(ctx, ids, 5 + turn)
            ids += said["tokens"]
            assert said["kv_cache_used"] == len(ids)
        assert ctx.restore(session) == len(ids)


def rendered(folder: Path, *texts: str) -> str:
    """The checkpoint's own template, by transformers; a user's text is first."""
    from transformers import AutoTokenizer

    roles = ("user", "assistant", "user")
    messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
    text: str = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    return text


@pytest.mark.parametrize("way", ["--chat", "--interactive"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_conversation_goes_on(
    gemrun_cli: Path,
    tiny_checkpoint: Make,
    artifact_cache: Make,
    tmp_path: Path,
    family: str,
    way: str,
) -> None:
    """Every turn by a process of its own; its ids are what the template puts behind an answer."""
    folder = tiny_checkpoint(family)
    model, session = artifact_cache(folder, *SIZE), tmp_path / "s"
    with GemRunContext(model, ignore_memory=True) as ctx:
        ids: list[int] = []
        for text in ("How warm is it?", "  And now? ", "Thanks."):
            asked = ("--chat", "--prompt", text) if way == "--chat" else ("--interactive",)
            stdin = "" if way == "--chat" else f"{text}\n"
            words = ("--session", session, *asked, "--max-tokens", "6")
            said = answer(gemrun_cli, model, *words, stdin=stdin)
            shown = rendered(folder, "q", "@@ANSWER@@", text) if ids else rendered(folder, text)
            ids += ctx.tokenize(shown.rpartition("@@ANSWER@@")[2], control=True)
            assert said["prompt_tokens"] == len(ids)
            assert said["tokens"] == by_hand(ctx, ids, 6)
            ids += said["tokens"]
            assert said["kv_cache_used"] == len(ids)
        assert ctx.restore(session) == len(ids)


def test_turns_of_one_process_are_those_of_several(
    gemrun_cli: Path, path: Path, tmp_path: Path
) -> None:
    options = ("--system", "Be short.", "--max-tokens", "5", *OPTIONS)
    lines = ("How warm is it?", "", "And now?")
    together = call(
        gemrun_cli, path, "--session", tmp_path / "a", "--interactive", *options,
        stdin="\n".join(lines),
    )  # fmt: skip
    assert (together.returncode, together.stderr) == (0, "")
    first = call(
        gemrun_cli, path, "--session", tmp_path / "b", "--prompt", lines[0], *options
    )  # fmt: skip
    second = answer(
        gemrun_cli, path, "--session", tmp_path / "b", "--chat", "--prompt", lines[2],
        "--max-tokens", "5",
    )  # fmt: skip
    found = [json.loads(line)["tokens"] for line in together.stdout.splitlines()]
    assert found == [json.loads(first.stdout)["tokens"], second["tokens"]]
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    again = call(gemrun_cli, path, "--session", tmp_path / "b", "--prompt", "x", *options)
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr.startswith(f"gemrun: --system: the conversation in {tmp_path}/b has begun")


def test_control_tokens_in_a_turn_are_plain_text(
    gemrun_cli: Path, path: Path, tmp_path: Path
) -> None:
    counts = []
    for text in ("Hello", "Hello<|im_end|>", "Hello<|im_start|>system"):
        session = tmp_path / str(len(counts))
        turn = ("--session", session, "--chat", "--max-tokens", "1", "--prompt")
        answer(gemrun_cli, path, *turn, "Hello")
        said = answer(gemrun_cli, path, *turn, text)
        counts.append(said["prompt_tokens"] - said["reused"])
    assert min(counts[1:]) > counts[0] + 3


def test_what_is_told(gemrun_cli: Path, path: Path, tmp_path: Path) -> None:
    words = ("--session", "s", "--max-tokens", "4", "--ignore-eos", "--prompt")
    first = call(gemrun_cli, path, *words, "abc", cwd=tmp_path)
    assert first.stderr.startswith("s: begins empty\n4 tokens (max_tokens)")
    kept = (tmp_path / "s").read_bytes()
    second = call(gemrun_cli, path, *words, "def", "--no-save", cwd=tmp_path)
    lines = second.stderr.splitlines()
    assert lines[0].startswith("s: ")
    assert lines[0].endswith(" tokens")
    assert "in the cache), " in lines[1]
    assert (tmp_path / "s").read_bytes() == kept
    assert call(gemrun_cli, path, *words, "def", cwd=tmp_path).stdout == second.stdout
    assert (tmp_path / "s").read_bytes() != kept


REFUSED: dict[str, tuple[list[str], str]] = {
    "--no-save": (["--no-save", "--prompt", "x"], "--no-save: is for --session, which was not"),
    "alone": (["--session", "s"], "--session: needs a --prompt to go on with, or --interactive"),
    "with info": (["--session", "s", "--info"], "--session: needs a --prompt to go on with"),
    "empty": (["--session=", "--prompt", "x"], "--session: its name is empty; see gemrun --help"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_options_that_need_others(gemrun_cli: Path, path: Path, tmp_path: Path, case: str) -> None:
    arguments, sentence = REFUSED[case]
    done = call(gemrun_cli, path, *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"gemrun: {sentence}")
    assert not list(tmp_path.iterdir())


def test_files_that_are_refused(
    gemrun_cli: Path, path: Path, tiny_checkpoint: Make, artifact_cache: Make, tmp_path: Path
) -> None:
    """Nothing runs, and the file stays."""
    other = artifact_cache(tiny_checkpoint("llama3"), *SIZE)
    words = ("--prompt", "abc", "--max-tokens", "4", "--ignore-eos", "--session")
    assert call(gemrun_cli, other, *words, tmp_path / "other").returncode == 0
    assert call(gemrun_cli, path, *words, tmp_path / "good").returncode == 0
    data = (tmp_path / "good").read_bytes()
    (tmp_path / "cut").write_bytes(data[:-1])
    (tmp_path / "bit").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    (tmp_path / "text").write_text("hello")
    (tmp_path / "folder").mkdir()
    cases = {
        "other": "saved from another model (",
        "cut": "cut short (",
        "bit": "damaged, its checksum disagrees",
        "text": "no saved session; name a file that save has written",
        "folder": "cannot be read (Is a directory); check the path and its permissions",
    }
    for name, sentence in cases.items():
        before = (tmp_path / name).stat()
        done = call(gemrun_cli, path, *words, tmp_path / name)
        assert (done.returncode, done.stdout) == (6, ""), name
        assert done.stderr.startswith(f"gemrun: {tmp_path / name}: {sentence}"), done.stderr
        assert done.stderr.count("\n") == 1
        assert ";" in done.stderr
        assert (tmp_path / name).stat() == before or name == "folder"
    done = call(gemrun_cli, path, *words, tmp_path / "good", "--kv-cache-size", "5")
    assert (done.returncode, done.stdout) == (2, "")
    assert "longer than this context's kv_cache_size of 5; open one with" in done.stderr
    done = call(gemrun_cli, path, *words, tmp_path / "none" / "s")
    assert (done.returncode, done.stdout) == (6, "")
    assert done.stderr == (
        f"gemrun: --session: {tmp_path}/none/s could not be saved ({tmp_path}/none/: No such file "
        "or directory); name a file elsewhere, or add --no-save\n"
    )
    done = call(gemrun_cli, path, *words, tmp_path / "good", "--chat")
    assert (done.returncode, done.stdout) == (2, "")
    assert "what is in the context is no conversation; go on with raw text" in done.stderr
    assert (tmp_path / "good").read_bytes() == data


def test_a_template_that_joins_answer_and_turn(
    gemrun_cli: Path, tiny_checkpoint: Make, artifact_cache: Make, tmp_path: Path
) -> None:
    """Its turns cannot be put behind an answer by their ids: refused, and raw text goes on."""
    folder = tmp_path / "joined"
    shutil.copytree(tiny_checkpoint("qwen3"), folder)
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ': ' + m['content'] + '\n\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant: ' }}{% endif %}"
    )
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    model = artifact_cache(folder, *SIZE, "--effort", "fast")
    words = ("--session", tmp_path / "s", "--max-tokens", "4", "--prompt", "Hello")
    assert call(gemrun_cli, model, *words, "--chat").returncode == 0
    kept = (tmp_path / "s").read_bytes()
    done = call(gemrun_cli, model, *words, "--chat")
    assert (done.returncode, done.stdout) == (2, "")
    assert "encodes an answer and the turn behind it as one text; go on with raw" in done.stderr
    assert (tmp_path / "s").read_bytes() == kept
    assert call(gemrun_cli, model, *words).returncode == 0


def test_a_context_that_is_full(gemrun_cli: Path, path: Path, tmp_path: Path) -> None:
    words = ("--session", tmp_path / "s", "--max-tokens", "1000", "--ignore-eos", "--json")
    done = call(gemrun_cli, path, *words, "--prompt", "abc")
    assert json.loads(done.stdout)["finish"] == "context_full"
    kept = (tmp_path / "s").read_bytes()
    done = call(gemrun_cli, path, *words, "--prompt", "more")
    assert (done.returncode, done.stdout) == (2, "")
    assert "do not fit behind the 320 in the context (room for 320); shorten it, or" in done.stderr
    assert (tmp_path / "s").read_bytes() == kept
    done = call(gemrun_cli, path, *words, "--prompt", "", "--on-full", "slide")
    assert json.loads(done.stdout)["generated_tokens"] == 1000
    assert call(gemrun_cli, path, *words[:-2], "--prompt", "abc", "--json").returncode == 0


def test_an_interrupted_answer_is_kept(gemrun_cli: Path, path: Path, tmp_path: Path) -> None:
    session = tmp_path / "s"
    running = subprocess.Popen(
        [
            gemrun_cli, path, "--session", session, "--prompt", "abc", "--ignore-eos", "--tokens",
            "--max-tokens", "1000000", "--on-full", "slide",
        ],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert running.stdout is not None
    assert running.stdout.read(1)
    running.send_signal(signal.SIGINT)
    _, stderr = running.communicate(timeout=60)
    assert running.returncode == 130, stderr
    assert b"(cancelled)" in stderr
    with GemRunContext(path, ignore_memory=True) as ctx:
        assert ctx.restore(session) > len(ctx.tokenize("abc", bos=True))


def test_an_answer_without_a_token_is_not_saved(
    gemrun_cli: Path, path: Path, tmp_path: Path
) -> None:
    """A deadline that ends it in its prompt; where the machine is too fast, it is saved."""
    words = ("--session", tmp_path / "s", "--ignore-eos", "--max-tokens", "2", "--json")
    assert call(gemrun_cli, path, *words, "--prompt", "abc").returncode == 0
    kept = (tmp_path / "s").read_bytes()
    long = ("--prompt", "word " * 100, "--deadline-ms", "1", "--prefill-batch-size", "1")
    done = call(gemrun_cli, path, *words, *long, "--kernel", "scalar", "--threads", "1")
    assert done.returncode == 0
    if json.loads(done.stdout)["generated_tokens"] == 0:
        assert done.stderr.endswith(
            "left as it was, no answer came to its first token; run it again\n"
        )
        assert (tmp_path / "s").read_bytes() == kept


def test_two_at_once_leave_one_of_both(gemrun_cli: Path, path: Path, tmp_path: Path) -> None:
    session = tmp_path / "s"
    words = [gemrun_cli, path, "--session", session, "--prompt", "abc", "--ignore-eos"]
    with GemRunContext(path, ignore_memory=True) as ctx:
        first, later = len(ctx.tokenize("abc", bos=True)), len(ctx.tokenize("abc"))
        alone = {first + 10, first + 20}
        for _ in range(5):
            session.unlink(missing_ok=True)
            both = [
                subprocess.Popen(
                    [*words, "--max-tokens", str(count)],
                    stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                )
                for count in (10, 20)
            ]  # fmt: skip
            for one in both:
                _, stderr = one.communicate(timeout=60)
                assert one.returncode == 0, stderr
            assert ctx.restore(session) in alone | {first + later + 30}  # one behind the other
    assert [p.name for p in tmp_path.iterdir()] == ["s"]
