"""Wrong input of every command: an exit code, one sentence that says what to do, and no trace.

The golden records have some of these sentences in full (`golden/test_faces.py`), and the ranges of
sampling settings are tried beside their declarations (`options/test_declarations.py`).
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from support.commands import run as run_anywhere
from support.tiny_heads import random_medusa
from support.workers import free_port

from specrun.convert.random_model import RandomLlama, write_random_llama

from .conftest import Models, Run

ASK = "generate -m target.gguf -p x -n 1"
ESCAPE = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
FAST = "calibrate -t 1 -c 256 -n 40 --ranks 30 --seconds 0"

REFUSALS: dict[str, list[tuple[str, int, str]]] = {
    "": [
        ("generat", 2, "Did you mean 'generate'?"),
        ("generate -p x", 2, "-m FILE"),
        ("generate -p x -m targte.gguf", 3, "Did you mean target.gguf"),
        ("generate -p x -m .", 3, "larger.gguf"),
        ("generate -p x -m no/model.gguf", 3, "there is no folder no"),
        ("generate -p x -m broken.gguf", 3, "broken.gguf"),
    ],
    ASK: [
        ("-c -5", 2, "--ctx-size"),
        ("-b 0", 2, "--batch-size"),
        ("-t 100000", 2, "--threads"),
        ("-s -2", 2, "--seed"),
        ("--spec-draft-n-max 0", 2, "--spec-draft-n-max"),
        ("--spec-draft-p-min 1.5", 2, "--spec-draft-p-min"),
        ("-ngl -3", 2, "--gpu-layers"),
        ("--samplers infill", 2, "is not in specrun"),
        ("--samplers top_k --sampling-seq k", 2, "give one of them"),
        ("--dry-sequence-breaker ''", 2, "dry_sequence_breakers"),
        ("--mirostat 2 --temp 1 --accept typical", 2, "is not exact"),
        ("-l 99999+1", 2, "the model has 320 tokens"),
        ("--chat-template chatml", 2, "--chat-template-file"),
        ("--chat-template '{{' --no-chat-template", 2, "one of --chat-template"),
        (f'--chat-template "{ESCAPE}"', 3, "chat template"),
        ("--no-chat-template -sys x", 2, "-sys"),
        ("--demo", 2, "exclude each other"),
        ("--draft-max 3", 2, "--spec-draft-n-max"),
        ("--draft-n 3", 2, "--spec-draft-n-max"),
        ("--draft-min 3", 2, "--spec-draft-p-min"),
        ("-f text.txt", 2, "one of -p and -f"),
        ("--tmep 1", 2, "--temp"),
        ("--drafter 'draft(targte.gguf)'", 3, "Did you mean target.gguf"),
        ("--drafter 'draft(stranger.gguf, vocabulary=same)'", 4, "has 320 tokens, the drafter 600"),
        # positions beyond the trained context
        ("--rope-scale 0.5", 2, "--rope-scale is 0.5: give 1"),
        ("--rope-scale nan", 2, "--rope-scale is nan"),
        ("--rope-freq-scale 2", 2, "above 0 and up to 1"),
        ("--rope-scale 2 --rope-freq-scale 0.5", 2, "have the same meaning"),
        ("--rope-scaling none --rope-scale 2", 2, "use linear or yarn"),
        ("--rope-scaling ntk", 2, "ntk"),
        ("--yarn-orig-ctx -1", 2, "yarn_orig_ctx is -1"),
        ("--yarn-beta-fast -3", 2, "yarn_beta_fast is -3"),
        # grammars
        ("""-j '{"type": "x"}'""", 2, "the JSON schema cannot be compiled: "),
        ("-j '{nope'", 2, "the JSON schema is no JSON: "),
        ("-j nowhere.json", 3, "there is no file nowhere.json"),
        ("--grammar nowhere.gbnf", 3, "there is no file nowhere.gbnf"),
        ("--grammar 'root ::= x'", 2, "the GBNF grammar cannot be compiled: Rule 'x' not found"),
        ("--grammar schema.json", 2, "give it as --json-schema"),
        ("--regex 'a('", 2, "the regular expression cannot be compiled: "),
        ("--regex a -j '{}'", 2, "give one of --json-schema and --regex"),
        ("--grammar-after a", 2, "--grammar-after needs --json-schema, --grammar or --regex"),
        # devices
        ("--device CUDA7", 2, "there is no device 'CUDA7'"),
        ("--device CUDA0,,", 2, "'CUDA0,,' is not a list of names"),
        ("-md target.gguf --device-draft NPU", 2, "there is no device 'NPU'"),
        ("--tensor-split a,b", 2, "'a,b' is not shares such as 3,1"),
        ("--tensor-split 1,1", 2, "1,1 does not add up with 0 devices"),
        ("--split-mode row", 2, "split mode row cuts matrices, and there is no GPU that can"),
        ("-ot nothing", 2, "'nothing' is not PATTERN=DEVICE"),
        ("-ot '(=CPU'", 2, "is no regular expression"),
        ("-ot 'ffn_.*_exps=CPU'", 2, "no tensor's name matches 'ffn_.*_exps'"),
        ("--rpc here", 2, "'here' is not HOST:PORT"),
        ("--rpc 127.0.0.1:1", 2, "no worker answers at 127.0.0.1:1"),
        # adapters, datastores and references
        ("--lora absent.gguf", 3, "absent.gguf"),
        ("--lora plain.gguf", 3, "plain.gguf"),
        ("--lora plain.gguf:much", 2, "much"),
        ("--drafter 'rest(none.store)'", 3, "none.store"),
        ("--drafter 'rest(text.txt)'", 3, "not a datastore"),
        ("--reference none.txt", 3, "none.txt"),
        ("--reference empty.txt", 2, "0 tokens"),
        ("--reference plain.gguf", 3, "UTF-8"),
        ("-md target.gguf --reference text.txt", 2, "ensemble"),
        ("--drafter none --reference text.txt", 2, "not part of none"),
        ("--drafter 'prompt-lookup(reference=none.txt)'", 3, "none.txt"),
    ],
    "datastore": [
        ("build text.txt -m target.gguf -o a.store", 2, "--force"),
        ("build text.txt -o x", 2, "--model"),
        ("build -m target.gguf -o x", 2, "FILES"),
        ("build txet.txt -m target.gguf -o x", 3, "no file"),
        ("build empty.txt -m target.gguf -o x", 2, "at least 2"),
        ("build text.txt -m text.txt -o x", 3, "GGUF"),
        ("build plain.gguf -m target.gguf -o x", 3, "UTF-8"),
        ("build text.txt -m target.gguf -o nowhere/x", 3, "folder"),
        ("info text.txt", 3, "not a datastore"),
        ("info a.store -m stranger.gguf", 4, "another vocabulary"),
        ("inof a.store", 2, "info"),
    ],
    "generate -m stranger.gguf -p x": [("--drafter 'rest(a.store)'", 4, "another vocabulary")],
    "quantize": [
        ("wide-F32.gguf Q4_KM", 2, "did you mean Q4_K_M?"),
        ("wide-F32.gguf out.gguf Q4_KM", 2, "did you mean Q4_K_M?"),
        ("wide-F32.gguf", 2, "TYPE is missing"),
        ("wide-F32.gguf out.gguf", 2, "TYPE is missing"),
        ("wide-F32.gguf a b c", 2, "4 names are too many"),
        ("wide-F16.gguf Q4_0", 3, "Did you mean"),
        ("text.txt Q4_0", 3, "not a GGUF file"),
        ("wide-F32.gguf IQ1_S", 2, "needs an importance matrix"),
        ("wide-F32.gguf Q4_0 --tensor-type attn_q", 2, "is not RE=TYPE"),
        ("wide-F32.gguf Q4_0 --tensor-type attn_q=Q9", 2, "there is no tensor type 'Q9'"),
        ("wide-F32.gguf none/out.gguf Q4_0", 3, "there is no folder"),
        ("wide-F32.gguf wide-F32.gguf Q4_0", 2, "already exists"),
        ("wide-F32.gguf Q4_0 --imatrix text.txt", 3, "is no importance matrix"),
    ],
    "imatrix": [
        ("-o m.gguf", 2, "there is no text and no matrix"),
        ("-f text.txt -o m.gguf", 2, "the model is missing"),
        ("-m wide-F32.gguf -f none.txt -o m.gguf", 3, "there is no file none.txt"),
        ("-m wide-F32.gguf -f text.txt -o no/m.gguf", 3, "there is no folder"),
        ("-m wide-F32.gguf -f text.txt -o m.gguf -c 512 --chunk 9", 2, "with chunk 9"),
        ("-m text.txt -f text.txt -o m.gguf", 3, "not a GGUF file"),
        ("--resume --in-file text.txt -o m.gguf", 2, "exclude each other"),
    ],
    "cut": [
        ("target.gguf cut.gguf", 2, "give one of them"),
        ("target.gguf cut.gguf --layers 0 --skip-layers 1", 2, "exclude each other"),
        ("target.gguf cut.gguf --layers 0-4", 2, "no layer 4: the model has 4 layers, 0 to 3"),
        ("target.gguf cut.gguf --skip-layers 0-3", 2, "leaves no model"),
        ("target.gguf cut.gguf --layers first", 2, "'first' is no layer"),
        ("target.gguf cut.gguf --pad-to 10", 2, "pad to more than that"),
        ("target.gguf cut.gguf --pad-to many", 2, "not a number of parameters"),
        ("none.gguf cut.gguf --layers 0", 3, "no file"),
        ("text.txt cut.gguf --layers 0", 3, "text.txt"),
        ("target.gguf nowhere/cut.gguf --layers 0", 3, "no folder"),
        ("target.gguf . --layers 0", 2, "is a folder"),
        ("target.gguf plain.gguf --layers 0", 2, "--force"),
    ],
    "inspect": [
        ("targte.gguf", 3, "Did you mean target.gguf"),
        ("broken.gguf", 3, "broken.gguf"),
        ("empty.txt", 3, "empty.txt"),
        ("target.gguf --sha256 12ab", 2, "is not a SHA-256"),
        ("target.gguf plain.gguf --sha256", 2, "goes without -md and --sha256"),
        ("target.gguf plain.gguf -f letter.txt -t 1", 2, "at least 8 are needed"),
        ("target.gguf stranger.gguf -t 1", 4, "token 316 is '<|end|>' in the first"),
        ("--memory 8G", 2, "name one model"),
        ("target.gguf -m target.gguf --memory 8G", 2, "name one model"),
        ("target.gguf --memory much", 2, "'much' is no amount of memory: give such as 8G or 512M"),
        ("target.gguf --memory 8G,,12G", 2, "'' is no amount of memory"),
        ("target.gguf --memory 0", 2, "'0' is no amount of memory"),
        ("target.gguf --memory 8G --sha256", 2, "--memory goes without"),
        ("target.gguf --memory 8G -ctk q9", 2, "cache_type_k is 'q9'"),
    ],
    FAST: [
        ("-m target.gguf", 2, "no heads are given"),
        ("-md heads.gguf", 2, "no model is given"),
        ("-m target.gguf -md plain.gguf", 3, "architecture llama"),
        ("-m target.gguf -md wide-heads.gguf", 4, "64 numbers"),
        ("-m target.gguf -md heads.gguf -f letter.txt", 2, "too short"),
        ("-m target.gguf -md heads.gguf -f text.txt -p a", 2, "give one of them"),
        ("-m target.gguf -md heads.gguf -f text.txt --temp 1", 2, "leave it out with -f"),
        ("-m target.gguf -md heads.gguf --no-save -o x.csv", 2, "give one of them"),
        ("-m target.gguf -md heads.gguf -o no/x.csv", 3, "no folder"),
    ],
    "tune": [("-m target.gguf -md heads.gguf", 2, "specrun calibrate")],
    "accelerate": [
        ("", 2, "give the model to accelerate"),
        ("none.gguf", 3, "there is no file none.gguf"),
        ("broken.gguf", 3, "broken.gguf"),
        ("target.gguf --hours 0", 2, "0 hours are no time to train in"),
        ("target.gguf --hours -1", 2, "-1 hours are no time to train in"),
        ("target.gguf --memory lots", 2, "'lots' is no amount of memory"),
        ("target.gguf --demo", 2, "the model is named twice"),
        ("target.gguf --prompts nothing.txt", 3, "there is no file nothing.txt"),
        ("target.gguf --prompts blank.txt", 2, "holds no prompts"),
        ("target.gguf -n 3", 2, "3 is not in the range"),
    ],
    "worker": [
        ("--host 0.0.0.0", 2, "neither authentication nor encryption: --allow-remote"),
        ("--host my-machine", 2, "'my-machine' is no IPv4 address"),
        ("--host 8.8.8.8 --allow-remote", 2, "cannot listen on 8.8.8.8:50052"),
        ("--mem lots", 2, "'lots' is no amount of memory: give such as 8G"),
        ("--mem 0", 2, "'0' is no amount of memory"),
        ("--mem -1G", 2, "is no amount of memory"),
        ("--port 0", 2, "0 is not in the range"),
        ("--port FREE --device CUDA7", 2, "there is no device 'CUDA7'"),
        ("--port FREE --cache text.txt", 2, "cannot be used (File exists): name a folder"),
    ],
    "learn": [
        ("forget", 2, "give -m TARGET or --all"),
        ("forget -m text.txt --all", 2, "give -m TARGET or --all"),
        ("forget -m nowhere.gguf", 3, "nowhere.gguf"),
    ],
}
CASES = [
    (f"{begin} {rest}".strip(), code, said)
    for begin, refusals in REFUSALS.items()
    for rest, code, said in refusals
]
WIDE = RandomLlama(vocab_size=320, width=256, ffn=256, layers=1)


@pytest.fixture(scope="module")
def folder(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models, heads, texts, and files that are none of these."""
    place = tmp_path_factory.mktemp("refusals")
    for model in (models.target, models.plain, models.larger, models.stranger):
        (place / model.name).symlink_to(model)
    write_random_llama(place / "wide-F32.gguf", WIDE)
    random_medusa(32, 320).write(place / "heads.gguf", 320)
    random_medusa(64, 320).write(place / "wide-heads.gguf", 320)
    texts = {"text.txt": "all work and no play. " * 60, "letter.txt": "a", "empty.txt": ""}
    texts |= {"blank.txt": "\n", "broken.gguf": "GGUF", "schema.json": '{"enum": ["abc"]}'}
    for name, text in texts.items():
        (place / name).write_text(text)
    files = (place / "text.txt", "-m", models.target, "-o", place / "a.store")
    assert run_anywhere("datastore build", *files).exit_code == 0
    return place


def states(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the size and the time of writing of each file."""
    found = {path.name: path.stat() for path in folder.iterdir()}
    return {name: (state.st_size, state.st_mtime_ns) for name, state in found.items()}


@pytest.mark.parametrize(("line", "code", "said"), CASES, ids=[case[0] for case in CASES])
def test_wrong_input_is_one_sentence_and_leaves_nothing(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, line: str, code: int, said: str
) -> None:
    monkeypatch.chdir(folder)
    before = states(folder)
    result = run("", *shlex.split(line.replace("FREE", str(free_port()))))
    errors = [text for text in result.stderr.splitlines() if text.startswith("Error: ")]
    assert (result.exit_code, len(errors), result.stdout) == (code, 1, ""), result.output
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert states(folder) == before
