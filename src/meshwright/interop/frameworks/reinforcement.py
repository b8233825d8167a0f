"""verl and NeMo-RL: reinforcement learning; read for what they refuse, not written.

Their memory holds generation engines and reference models beside training, so it is not judged, and their keys are not checked for misspellings.
"""

from meshwright.interop.keys import SWITCH, Facts, Framework, Key, Table, rows

ACTOR, POLICY = "actor_rollout_ref.actor.", "policy."
DEGREES = (
    ("tensor_model_parallel_size", "tp"), ("pipeline_model_parallel_size", "pp"), ("context_parallel_size", "cp"),
    ("expert_model_parallel_size", "ep"), ("expert_tensor_parallel_size", "expert_tp"),
)  # fmt: skip


def _derive(facts: Facts) -> None:
    facts.setdefault("sharding", "parameters")
    facts["sp"] = bool(facts.get("sp")) and facts.get("tp", 1) > 1


VERL = Framework(
    name="verl",
    title="verl",
    stack="accelerate",
    form="yaml",
    table=Table(
        keys=(
            *rows((
                ("actor_rollout_ref.model.path", "model"), (ACTOR + "ppo_micro_batch_size_per_gpu", "microbatch"),
                ("trainer.n_gpus_per_node", "gpus_per_node"), ("trainer.nnodes", "nodes"),
            )),
            *rows(DEGREES, prefix=ACTOR + "megatron."),
            Key(ACTOR + "strategy", "sharding", match=(("megatron", "optimizer"), ("fsdp", "parameters"))),
        ),
        not_modelled=(r".",),
        derive=_derive,
    ),
)  # fmt: skip
NEMO_RL = Framework(
    name="nemo-rl",
    title="NeMo-RL",
    stack="automodel",
    form="yaml",
    table=Table(
        keys=(
            *rows((
                ("tensor_parallel_size", "tp"), ("context_parallel_size", "cp"), ("dp_replicate_size", "replicate"),
            ), prefix="policy.dtensor_cfg."),
            Key(POLICY + "dtensor_cfg.sequence_parallel", "sp", words=SWITCH),
            *rows(DEGREES, prefix=POLICY + "megatron_cfg.", unset=(1,)),  # the section that is off has degrees of 1
            *rows((
                (POLICY + "model_name", "model"), (POLICY + "max_total_sequence_length", "seq"), (POLICY + "train_micro_batch_size", "microbatch"),
                ("cluster.gpus_per_node", "gpus_per_node"), ("cluster.num_nodes", "nodes"),
            )),
        ),
        not_modelled=(r".",),
        derive=_derive,
    ),
    names=("NeMo RL", "NeMo-Reinforcer"),
)  # fmt: skip
