"""verl and NeMo-RL: reinforcement learning; read for what they refuse, not written.

Their memory holds generation engines and reference models beside training, so it is not judged, and their keys are not checked for misspellings.
"""

from meshwright.interop.keys import SWITCH, Facts, Framework, Key, Table, rows

ACTOR, MEGATRON = "actor_rollout_ref.actor.", "actor_rollout_ref.actor.megatron."
POLICY = "policy."
ANY_KEY = (r".",)


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
            Key("actor_rollout_ref.model.path", "model"),
            *rows((
                ("tensor_model_parallel_size", "tp"), ("pipeline_model_parallel_size", "pp"), ("context_parallel_size", "cp"),
                ("expert_model_parallel_size", "ep"), ("expert_tensor_parallel_size", "expert_tp"),
            ), prefix=MEGATRON),
            Key(ACTOR + "strategy", "sharding", match=(("megatron", "optimizer"), ("fsdp", "parameters"))),
            Key(ACTOR + "ppo_micro_batch_size_per_gpu", "microbatch"),
            Key("trainer.n_gpus_per_node", "gpus_per_node"), Key("trainer.nnodes", "nodes"),
        ),
        not_modelled=ANY_KEY,
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
            Key(POLICY + "model_name", "model"),
            Key(POLICY + "dtensor_cfg.tensor_parallel_size", "tp"), Key(POLICY + "dtensor_cfg.context_parallel_size", "cp"),
            Key(POLICY + "dtensor_cfg.sequence_parallel", "sp", words=SWITCH),
            Key(POLICY + "dtensor_cfg.dp_replicate_size", "replicate"),
            # A file has both sections, and the one that is off has degrees of 1.
            *(Key(POLICY + f"megatron_cfg.{name}", fact, unset=(1,)) for name, fact in (
                ("tensor_model_parallel_size", "tp"), ("pipeline_model_parallel_size", "pp"), ("context_parallel_size", "cp"),
                ("expert_model_parallel_size", "ep"), ("expert_tensor_parallel_size", "expert_tp"))),
            Key(POLICY + "max_total_sequence_length", "seq"), Key(POLICY + "train_micro_batch_size", "microbatch"),
            Key("cluster.gpus_per_node", "gpus_per_node"), Key("cluster.num_nodes", "nodes"),
        ),
        not_modelled=ANY_KEY,
        derive=_derive,
    ),
    names=("NeMo RL", "NeMo-Reinforcer"),
)  # fmt: skip
