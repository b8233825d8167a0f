#!/bin/bash
# Llama 3 8B on 64 GPUs: tensor parallelism inside the node, ZeRO-1 over the other ranks.
NODES=8
MODEL=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear
    --position-embedding-type rope --rotary-base 500000 --max-position-embeddings 8192
    --untie-embeddings-and-output-weights --tokenizer-type HuggingFaceTokenizer
)
PLAN=(
    --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer
    --overlap-grad-reduce --overlap-param-gather --micro-batch-size 2 --global-batch-size 512 --seq-length 8192 --bf16
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
)
torchrun --nnodes $NODES --nproc-per-node 8 pretrain_gpt.py ${MODEL[@]} ${PLAN[@]} \
    --lr 3e-4 --lr-decay-style cosine --train-iters 100000 --attention-backend flash --save checkpoints
