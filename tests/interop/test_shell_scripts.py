"""Launch scripts are read as bash runs them: the words of every command are compared with those that bash itself passes."""

import contextlib
import os
import random
import shlex
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest

from meshwright.errors import MeshwrightError
from meshwright.interop.files import is_settings_file, read_settings, script_of
from meshwright.interop.reading import raise_first
from meshwright.interop.shell import syntax
from meshwright.interop.shell.commands import Shell
from meshwright.interop.shell.open_values import closed
from meshwright.interop.shell.scripts import text_beside

MODEL = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --max-position-embeddings 4096"
# ruff: noqa: E501
SNIPPETS = {
    "quoted options over lines": 'N=4\nARGS=" \\\n  --num-layers $N \\\n  --hidden-size 64 \\\n"\nrun $ARGS --last 1',
    "arrays": 'A=(\n  --a 1 # a comment\n  --b "two words"\n)\nA+=(--c 3)\nrun "${A[@]}" --n ${#A[@]} ${A[1]} "${A[*]}"',
    "array in a quoted command": 'A=(--a 1 --b 2)\nC="run ${A[@]} --c"\n$C\neval $C',
    "defaults": 'run ${X:-3} "${X-4}" ${Y:=5} $Y ${Y:+set} ${Z:+unset} "${Z:-a b}"; : "${W:=7}"; run $W',
    "arithmetic": 'N=3\nrun $((N*2+1)) $(( (N + 1) / 2 )) $((N > 2 && N < 5)) $(($N ** 3 % 5)) $((N==3?8:4)) $((-7/2)) $((010 + 1))',
    "counting": "N=1; ((N++)); (( N *= 4 )); let M=3 2>/dev/null; run $N; N+=1; run $N",
    "prefixes and suffixes": "F=/a/b/model.tar.gz\nrun ${F##*/} ${F%.*} ${F%%.*} ${F#/a} ${#F} ${F/model/x} ${F//a/o} ${F:3:4} ${F: -2}",
    "cases of letters": "S=Abc; run ${S,,} ${S^^}",
    "branches": 'TP=8\nif [ "$TP" -gt 4 ] && [[ $TP != 16 ]]; then run --sp; elif [ $TP = 1 ]; then run --no; else run --never; fi',
    "tests": '[ -z "$NOPE" ] && run 1\n[[ -n $NOPE ]] && run 2\n[[ abc == a* ]] && run 3\n[ abc = "a*" ] || run 4\n[[ a3 =~ ^a[0-9]$ ]] && run 5\n! [ 1 -eq 2 ] && run 6',
    "case": 'SIZE=70b\ncase "$SIZE" in\n  7b) L=32 ;;\n  13b|70b)\n    L=80\n    H=8192 ;;\n  *) L=1 ;;\nesac\nrun $L $H',
    "loops": "for tp in 1 2 4; do for pp in 1 2; do run --tp $tp --pp $pp; done; done\ni=0; while [ $i -lt 3 ]; do run $i; i=$((i+1)); done",
    "functions": 'launch() {\n  local tp=$1; shift\n  run --tp $tp "$@"\n}\nlaunch 8 --a "b c"\nfunction two { run two; }\ntwo',
    "here-documents": "L=3\nread -r -d '' A <<EOF\n--num-layers $L\n--b\nEOF\nrun $A\nB=$(cat <<'EOF'\n$L --q\nEOF\n)\nrun $B",
    "printed values": 'A=$(echo --a 1)\nB="$( [ 1 = 1 ] && echo "--flag" )"\nrun $A $B $(echo "$((2*3))") `echo back`',
    "quotes": """run 'single $X' "double \\"inner\\" \\$5" mixed'a b'"c d" a\\ b "" '' $'tab'""",
    "empty words": 'E=""\nrun $E "$E" a${E}b "x$E"',
    "operators on one line": "run a; run b && run c || run d | cat; { run e; }; (X=1; run f$X); run g$X & wait",
    "comments": "run a # b\n# run c\nrun d#e \\\n  f\n",
    "redirections": "run a > /dev/null 2>&1; run b &>/dev/null; run c 2>/dev/null </dev/null; run d >> /dev/null",
    "indirect and associative": 'declare -A L=([7b]=32 [70b]=80)\nS=70b\nrun ${L[$S]} ${L[7b]}\nP=S; run ${!P}',
    "an element of a plain variable": 'A=2\nA[1]=3\nB=""\nB+=(4)\nrun "${A[@]}" "${B[@]}"',
    "exported": "export A=1 B='x y'\ndeclare -i C=4\nreadonly D=5\nrun $A \"$B\" $C $D",
    "nested programs": "X=3\nbash -c \"run inner $X\"\neval 'run $X'\n",
    "negative and signed words": "run --lr 1e-4 -1 --x=-2 +a.b=c key=value",
}  # fmt: skip


def bash_words(text: str, tmp_path: Path) -> list[list[str]]:
    """The words of every start of `run` by bash, without arguments and in an empty environment."""
    log, program = tmp_path / "log", tmp_path / "bin" / "run"
    program.parent.mkdir(exist_ok=True)
    program.write_text(
        f'#!/bin/bash\n{{ for word in "$@"; do printf "%s\\0" "$word"; done; printf "\\1"; }} >> {log}\n'
    )
    program.chmod(0o755)
    for name in ("cat", "bash"):
        (program.parent / name).symlink_to(shutil.which(name) or f"/bin/{name}")
    log.write_text("")
    script = tmp_path / "script.sh"
    script.write_text(text)
    subprocess.run(
        [shutil.which("bash") or "bash", str(script)],
        env={"PATH": str(program.parent)},
        timeout=20,
        check=False,
        capture_output=True,
    )
    return [entry.split("\0")[:-1] for entry in log.read_text().split("\1")[:-1]]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("name", SNIPPETS)
def test_words_are_those_of_bash(name: str, tmp_path: Path) -> None:
    shell = Shell()
    shell.run(syntax.parse(SNIPPETS[name]))
    found = [[closed(word) for word in each.words[1:]] for each in shell.started if each.words[0] == "run"]
    assert sorted(found) == sorted(bash_words(SNIPPETS[name], tmp_path))


DOCUMENTS = {
    "cat": 'N=3\nF="./a.json"\ncat <<EOT > $F\n{"a": $N, "b": {"c": "x $N", "d": \'1\'}, "e": $((N * 2))}\nEOT\n',
    "the file first, nothing replaced": "cat > a.json <<'EOF'\n{\"a\": $N}\nEOF\n",
    "tee": 'tee a.json > /dev/null <<EOF\n{"a": 1}\nEOF\n',
    "escapes": 'N=3\ncat <<EOF > a.json\n{"a": "x \\"$N\\" \\$N \\`b\\` \\\\ \\n \\\nc", "d": "$(echo "\\"e\\"")"}\nlast "$N"\nEOF\n',
    "in a function": 'write() {\ncat <<EOF > "$1"\n{"a": $2}\nEOF\n}\nwrite a.json 5\n',
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_of_here_documents_are_those_that_bash_writes(name: str, tmp_path: Path) -> None:
    shell = Shell()
    shell.run(syntax.parse(DOCUMENTS[name]))
    bash = shutil.which("bash") or "bash"
    subprocess.run([bash, "-c", DOCUMENTS[name]], cwd=tmp_path, timeout=20, check=True, capture_output=True)
    assert [text + "\n" for text in shell.files.values()] == [(tmp_path / "a.json").read_text()]
    assert not shell.started


def script(tmp_path: Path, text: str, name: str = "train.sh") -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode())
    return path


def test_a_value_that_is_left_open_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = script(
        tmp_path,
        f"python pretrain_gpt.py {MODEL} --tensor-model-parallel-size ${{TP}} --micro-batch-size $1 --vocab-size 32000",
    )
    reading = read_settings(path)
    assert reading.understood.others["left open"] == ["--tensor-model-parallel-size = ${TP}", "--micro-batch-size = $1"]
    assert {p.code for p in reading.errors} >= {"MW-SET-016"}
    with pytest.raises(MeshwrightError, match="TP=N meshwright"):
        raise_first(reading.errors)
    monkeypatch.setenv("TP", "4")
    reading = read_settings(path)
    assert reading.plan.tp == 4
    assert "TP: 4 (from the environment)" in reading.assembled.assumed


def test_the_environment_changes_nothing_that_the_script_assigns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TP", "4")
    text = f"TP=2\npython pretrain_gpt.py {MODEL} --tensor-model-parallel-size $TP --pipeline-model-parallel-size ${{PP:-3}}"
    monkeypatch.setenv("PP", "8")
    reading = read_settings(script(tmp_path, text))
    assert (reading.plan.tp, reading.plan.pp) == (2, 3)


@pytest.mark.parametrize(
    ("launcher", "gpus"),
    [
        ("torchrun --nnodes=4 --nproc_per_node 8", 32),
        ("torchrun --nproc-per-node=8", 8),
        ("srun -N 2 --ntasks-per-node=4 python", 8),
        ("srun --nodes=2 --gres=gpu:h100:8 torchrun --nproc_per_node=8", 16),
        ("accelerate launch --num_processes 16 --num_machines 2", 16),
        ("mpirun -np 24 python", 24),
        ("deepspeed --num_nodes 2 --num_gpus 8", 16),
        ("deepspeed --num_gpus=8", 8),
        ("/usr/bin/env python -m deepspeed.launcher.runner --num_gpus 4", 4),
        ("deepspeed --hostfile hosts --num_gpus 8", 0),
        ("deepspeed -H hosts --num_nodes 2 --num_gpus 8", 16),
        ("deepspeed --include localhost:0,2,3", 3),
        ("deepspeed -i a:0,1@b:2,3 --master_port 2", 4),
        ("deepspeed --hostfile hosts --include=a:0,1@b:2", 3),
        ("deepspeed --include a@b:1", 0),
        ("deepspeed --exclude a:1", 0),
        ("deepspeed", 0),
        ("python -m torch.distributed.launch --nproc_per_node=4", 4),
        ("srun --container-image=deepspeed:1 --gres=gpu:4 python", 0),
        ("torchrun --nnodes $UNKNOWN --nproc_per_node 8", 0),
        ("#SBATCH -N 8\n#SBATCH --gres=gpu:8\n#SBATCH --ntasks-per-node=1\nsrun accelerate launch --num_processes 64 --num_machines 8", 64),
        ("#SBATCH -N 8\n#SBATCH --gres=gpu:8\n#SBATCH --ntasks-per-node=1\nsrun torchrun --nnodes 8 --nproc_per_node 4", 32),
        ("#SBATCH -N 8\n#SBATCH --gres=gpu:8\n#SBATCH --ntasks-per-node=1\nsrun python", 64),
        ("#SBATCH --nodes=16\n#SBATCH --gpus-per-node=4\nsrun bash -c", 64),
        ("#SBATCH -N 3\n#SBATCH --gres=gpu:8\nsrun torchrun --nnodes $SLURM_NNODES --nproc_per_node $SLURM_GPUS_ON_NODE", 24),
    ],
)  # fmt: skip
def test_gpus_of_launchers(launcher: str, gpus: int) -> None:
    program = f"pretrain_gpt.py {MODEL}"
    command = shlex.quote(f"python {program}") if launcher.endswith("-c") else program
    assert script_of(f"{launcher} {command}\n").gpus == gpus


def test_the_training_is_the_command_with_the_most_keys() -> None:
    text = f"python preprocess.py --vocab-size 3 --seq-length 1\ntorchrun pretrain_gpt.py {MODEL} --seq-length 8\npython plot.py --lr 1\n"
    args = script_of(text).args
    assert args[args.index("--seq-length") + 1] == "8"
    assert "--vocab-size" not in args


@pytest.mark.parametrize("text", [f"ARGS='{MODEL}'\n", f"{MODEL}\n", f"A=({MODEL})\nexport A\n"])
def test_flags_without_a_command(text: str) -> None:
    assert read_settings_of(text)["--num-layers"] == "32"


def read_settings_of(text: str) -> dict[str, str]:
    args = script_of(text).args
    return dict(zip(args[1::2], args[2::2], strict=False)) | dict(zip(args[::2], args[1::2], strict=False))


def test_no_secret_of_the_environment_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a1b2c3")
    monkeypatch.setenv("TP", "2")
    text = f"python pretrain_gpt.py {MODEL} --tensor-model-parallel-size $TP --wandb-key $WANDB_API_KEY"
    assert script_of(text).environment == {"TP": "2"}
    assert "a1b2c3" not in str(script_of(text))


def test_an_open_condition_is_named(tmp_path: Path) -> None:
    text = f"if [ -f /data/x ]; then EXTRA=(--recompute-granularity full); fi\npython pretrain_gpt.py {MODEL} ${{EXTRA[@]}}\n"
    reading = read_settings(script(tmp_path, text))
    assert reading.understood.others["left out"] == ["line 1: EXTRA=(--recompute-granularity full)"]


def deepspeed_script(name: str, document: str = "") -> str:
    flags = "--vocab-size 32000 --seq-length 2048 --zero-stage 0 --global-batch-size 64 --micro-batch-size 2 --swiglu"
    return f"S=2\n{document}\ndeepspeed --num_nodes 1 --num_gpus 8 pretrain_gpt.py {MODEL} {flags} --deepspeed --deepspeed_config {name}\n"


JSON = '{"train_batch_size": 64, "zero_optimization": {"stage": $S}, "fp16": {"enabled": true, "loss_scale": 0}}'


def test_the_settings_of_deepspeed_that_a_script_writes_are_read(tmp_path: Path) -> None:
    reading = read_settings(
        script(tmp_path, deepspeed_script("./ds.$JOB.json", f"cat <<E > ./ds.$JOB.json\n{JSON}\nE"))
    )
    assert (reading.plan.zero, reading.workload.batch, reading.plan.microbatch) == (2, 64, 2)
    assert reading.facts["half"] == "fp16"
    assert "left open" not in reading.understood.others
    assert not [key for key in reading.understood.unknown if "deepspeed" in key]


def test_an_open_value_of_a_written_file_is_told_and_asked_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = deepspeed_script("ds.json", f"cat <<E > ds.json\n{JSON.replace('$S', '$STAGE')}\nE")
    assert read_settings(script(tmp_path, text)).understood.others["left open"] == ["zero_optimization.stage = $STAGE"]
    monkeypatch.setenv("STAGE", "3")
    assert read_settings(script(tmp_path, text)).plan.zero == 3


def test_the_settings_of_deepspeed_beside_a_script_are_read(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(JSON.replace("$S", "1"))
    path = script(tmp_path, deepspeed_script("configs/ds.json"))
    assert read_settings(path).plan.zero == 1
    assert read_settings(path, text=path.read_text()).plan.zero == 0  # a text from elsewhere: no file is read


@pytest.mark.parametrize("document", ["", "cat <<E > ds.json\n{broken\nE"])
def test_settings_of_deepspeed_that_are_not_known_are_left_open(document: str, tmp_path: Path) -> None:
    others = read_settings(script(tmp_path, deepspeed_script("ds.json", document))).understood.others
    assert others["left open"] == ["--deepspeed_config = ds.json, whose JSON is not in the script, nor beside it"]
    assert not [key for key in others.get("unknown", []) if "deepspeed" in key]


def test_batches_of_megatron_come_before_those_of_the_file(tmp_path: Path) -> None:
    text = deepspeed_script("ds.json", f"cat <<E > ds.json\n{JSON.replace('64', '512')}\nE")
    reading = read_settings(script(tmp_path, text))
    assert reading.workload.batch == 64
    assert "--global-batch-size = 64, not the train_batch_size = 512 of ds.json" in reading.assembled.assumed


def test_sourced_files_are_named(tmp_path: Path) -> None:
    text = f"source ./env.sh\n. ~/venv/bin/activate\n. $HOME/model.sh\npython pretrain_gpt.py {MODEL}\n"
    reading = read_settings(script(tmp_path, text))
    assert reading.understood.others["not read"] == ["./env.sh", "$HOME/model.sh"]


COMMON = 'TP=2\nARGS=(--num-layers 32)\nlaunch() { run --tp $TP --pp $1 "${ARGS[@]}"; }\nrun sourced $# ${1:-none}\n'
SOURCES = {
    "by name": 'TP=1\nsource common.sh\nlaunch 4\nrun $TP',
    "by a dot, with arguments": ". ./common.sh a b\nrun $#; launch 1",
    "from a folder, which sources another": "source conf/more.sh\nrun $MORE $TP",
    "where the script lies": 'source "$(dirname "$0")/common.sh"; launch 1\nHERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)\n. "$HERE/conf/more.sh"; run $MORE',
    "in a function and in a subshell": "load() { . ./common.sh; }\n(load; launch 2)\nrun x$TP\nload; run y$TP",
    "itself": 'N=$((${N:-0} + 1)); [ $N -lt 3 ] && source script.sh\nrun $N',
}  # fmt: skip


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("name", SOURCES)
def test_sourced_files_are_read_as_bash_reads_them(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "common.sh").write_text(COMMON)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "more.sh").write_text("MORE=3\n. ./common.sh\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "dirname").symlink_to(shutil.which("dirname") or "/usr/bin/dirname")
    (tmp_path / "script.sh").write_text(SOURCES[name])
    shell = Shell(beside=partial(text_beside, tmp_path))
    shell.run(syntax.parse(SOURCES[name]))
    found = [[closed(word) for word in each.words[1:]] for each in shell.started if each.words[0] == "run"]
    assert sorted(found) == sorted(bash_words(SOURCES[name], tmp_path))
    assert not shell.sourced


def test_files_outside_the_folder_of_a_script_are_not_sourced(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    for outside in (tmp_path / "env.sh", tmp_path / "other.sh"):
        outside.write_text("TP=4\n")
    (folder / "link.sh").symlink_to(tmp_path / "env.sh")
    (folder / "env.sh").write_text("TP=2\n")
    names = [
        "../env.sh",
        str(tmp_path / "env.sh"),
        "link.sh",
        "none.sh",
        "~/env.sh",
        "x" * 5000,
        "$X/env.sh",
        ".",
        "$(dirname $0)/../env.sh",
    ]
    text = "".join(f"source {name}\n" for name in names)
    command = f"python pretrain_gpt.py {MODEL} --tensor-model-parallel-size ${{TP:-1}}\n"
    reading = read_settings(script(folder, text + command))
    assert reading.plan.tp == 1
    assert reading.understood.others["not read"] == names
    read = read_settings(script(folder, "source env.sh\n" + command))
    assert read.plan.tp == 2
    assert "env.sh: beside the script, which sources it" in read.assembled.assumed
    elsewhere = read_settings(folder / "train.sh", text="source env.sh\n" + command)
    assert elsewhere.plan.tp == 1  # a text from elsewhere has no files beside it


def test_a_script_that_states_no_dropout_has_that_of_its_framework(tmp_path: Path) -> None:
    """Megatron-LM's training/arguments.py: --hidden-dropout and --attention-dropout are 0.1 unless they are set."""
    text = f"python pretrain_gpt.py {MODEL} --vocab-size 32000 --seq-length 2048 --attention-dropout 0\n"
    reading = read_settings(script(tmp_path, text))
    model = reading.shape.model
    assert (model.dropout, model.dropout_rate, model.attention_dropout) == (True, 0.1, 0)
    assert "hidden dropout: 0.1, the default of Megatron-LM" in reading.assembled.assumed
    assert not [each for each in reading.assembled.assumed if each.startswith("attention dropout")]


def test_a_file_of_hosts_is_named(tmp_path: Path) -> None:
    text = f"deepspeed --hostfile hosts.txt --num_gpus 8 pretrain_gpt.py {MODEL}\n"
    assert read_settings(script(tmp_path, text)).understood.others["not read"] == ["hosts.txt"]
    counted = text.replace("--num_gpus", "--num_nodes 2 --num_gpus")
    assert "not read" not in read_settings(script(tmp_path, counted)).understood.others


def test_hydra_overrides_of_a_script(tmp_path: Path) -> None:
    text = "N=2\npython -m verl.trainer.main_ppo actor_rollout_ref.actor.strategy=fsdp trainer.nnodes=$N +trainer.n_gpus_per_node=8\n"
    assert script_of(text).settings == {
        "actor_rollout_ref.actor.strategy": "fsdp",
        "trainer.nnodes": "2",
        "trainer.n_gpus_per_node": "8",
    }


def test_line_ends_marks_and_shebangs(tmp_path: Path) -> None:
    text = f"#!/usr/bin/env bash\nTP=2\npython pretrain_gpt.py {MODEL} --tensor-model-parallel-size $TP\n"
    assert read_settings(script(tmp_path, "\ufeff" + text.replace("\n", "\r\n"))).plan.tp == 2
    assert is_settings_file(script(tmp_path, text, "launch"))
    assert not is_settings_file(script(tmp_path, "hello", "other"))


def test_odd_texts_end() -> None:
    """Text that is not shell, and loops without end, are read in bounded time."""
    rng = random.Random(0)
    pieces = ["if", "then", "fi", "do", "done", "case", "esac", "in", "{", "}", "(", ")", "((", "))", "$(", "${", "`", "'", '"', "<<EOF", "EOF", "\n", " ", ";", "&&",
              "|", "A=(", "A=1", "$A", "--x", "while true", "for i in", "function f", "f()", "[[", "]]", "\\", "#", "$((1/0))", "é"]  # fmt: skip
    for _ in range(150):
        script_of(" ".join(rng.choices(pieces, k=rng.randrange(30))))
    for text in (
        "while true; do f; done",
        "f() { f; f; }\nf",
        "f() { f & f & }; f",
        "$(" * 3000,
        "((" * 3000,
        '"' * 999,
        "a " * 5_000,
        'X="$X$X"\n' * 40,
    ):
        with contextlib.suppress(MeshwrightError):
            script_of(text)


def test_nothing_is_started(tmp_path: Path) -> None:
    target = tmp_path / "made"
    script_of(f"touch {target}\nX=$(touch {target})\n`touch {target}`\necho x > {target}\neval 'touch {target}'\n")
    assert not os.path.exists(target)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "torchrun --nnodes 4 --nproc_per_node 8 train.py --job.config_file ./llama3_8b.toml",
            "the file that its program reads: ./llama3_8b.toml",
        ),
        ("torchrun --nnodes 4 --nproc_per_node 8 train.py --hidden_width 4096", "no settings that are known"),
        (
            "torchrun train.py --num_layers 4 --lr 1 --bf16 1 --hidden_size 8 --train_batch_size 9 --sharding_strategy full --intermediate_size 2 --attn_size 3",
            "others could matter",
        ),
    ],
)
def test_a_program_that_is_not_known_is_not_read_as_another(text: str, words: str, tmp_path: Path) -> None:
    """The flags of torchrun are no settings of a framework, and a few common names do not make one."""
    with pytest.raises(MeshwrightError, match="MW-SET-010") as raised:
        read_settings(script(tmp_path, text))
    assert words in str(raised.value)


def test_keys_that_inference_servers_have_too_name_no_framework(tmp_path: Path) -> None:
    """TensorRT-LLM's YAML has tp_size and pp_size, as Megatron-Bridge's recipes have beside keys of their own."""
    server = script(
        tmp_path, "tp_size: 4\npp_size: 1\nep_size: 1\nmax_batch_size: 8\nbackend: pytorch\n", "server.yaml"
    )
    with pytest.raises(MeshwrightError, match="only keys that other programs have too"):
        read_settings(server)
    recipe = script(tmp_path, "tp_size: 4\npp_size: 1\nmbs: 1\ngbs: 8\nseq_length: 4096\n", "recipe.yaml")
    assert read_settings(recipe).framework.name == "megatron-bridge"
