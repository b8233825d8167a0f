"""The training loop of `meshwright train` in your own hands, under any plan and on any number of ranks.

torchrun --nproc-per-node 4 examples/own_loop.py examples/demo-dp2-tp2.toml
"""

import os
import sys

import meshwright as mw
from meshwright.parallel.apply import apply
from meshwright.training.data.samples import training_samples
from meshwright.training.launch.join import joined
from meshwright.training.launch.rank import placement
from meshwright.training.loop import Trainer
from meshwright.training.optimizer.norm import clip, counted_squares
from meshwright.training.optimizer.schedule import set_learning_rate

config = mw.load(sys.argv[1])
with joined(placement(os.environ)) as here:
    parallel = apply(config.model, config.plan, config.workload, here.rank, device=here.device)
    trainer = Trainer(parallel, training_samples(config, config.run.seed), config.optimizer, ahead=2)
    for trainer.step in range(config.run.steps):  # what the learning rate depends on
        batch = trainer.loader.batch(trainer.step, trainer.indices)
        parallel.set_tokens(parallel.all_reduce(batch.valid.double(), "dp_cp"), scale=1.0)  # of all ranks
        parallel.begin_step(trainer.step, trainer.indices, batch.documents_BS)
        loss = parallel.forward_backward(batch.inputs, batch.targets)  # through the pipeline, if there is one
        parallel.finish_gradients()
        norm = parallel.all_reduce(counted_squares(parallel.pieces), "world").sqrt()
        clip(parallel.pieces, norm, config.optimizer.clip)
        set_learning_rate(trainer.optimizer, trainer.learning_rate)
        with parallel.updating():  # gradients to the fp32 copies of narrow weights, and the weights back
            trainer.optimizer.step()
        parallel.zero_gradients()
        loss = parallel.all_reduce(trainer.counted_loss(loss), "world")
        if here.rank == 0:
            print(f"step {trainer.step}: loss {loss.item():.6f}, gradient norm {norm.item():.4f}")
