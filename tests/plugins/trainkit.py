"""A plug-in as a user writes it: a framework, with a table of its keys and the command that starts it."""

from meshwright.interop.frameworks import FRAMEWORKS
from meshwright.interop.keys import Framework, Key, Table

TABLE = Table(
    keys=(
        Key("mesh.data", "dp", always=True),
        Key("mesh.tensor", "tp", default=1, always=True),
        Key("mesh.sequence", "sp", words={True: True, False: False}, default=False, always=True),
        Key("train.sequence_length", "seq", always=True),
        Key("train.global_batch", "batch", always=True),
        Key("train.microbatch", "microbatch", always=True),
        Key("model.name", "model", always=True),
    )
)


def program(config, plan, folder, save_every):
    from meshwright.view.launch_files.frameworks import with_file

    return with_file(FRAMEWORKS["trainkit"], config, folder, {}, ("-m", "trainkit", "--config", "{file}"), ())


FRAMEWORKS.register(
    Framework(
        "trainkit",
        "Trainkit",
        "torchtitan",
        "toml",
        TABLE,
        package="trainkit",
        program=program,
    )
)
