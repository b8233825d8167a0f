"""Run collective programs between processes, over point-to-point messages and shared memory, alone or as a torch.distributed backend.

    communicator = Communicator.of_group(group)
    communicator.run(build("all-reduce", "ring", ranks, tensor.numel()), tensor)      # any program of `programs.collectives`

    import meshwright.comm.backend                                                   # or as a backend:
    torch.distributed.init_process_group("meshwright")

Read `schedule` (the part of a program that one rank executes), then `run` (the interpreter), then `transport` (how a
message reaches another rank).
"""
