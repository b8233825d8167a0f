"""Chrome traces of a GPU made by hand, with the arguments that torch.profiler and NCCL write."""

import gzip
import json

MICRO = 1000  # nanoseconds


class HandMade:
    """A trace of one rank; times are microseconds."""

    def __init__(self, rank=0, world=2, host="a", base=0, groups=None):
        self.events, self.number = [], 0
        config = [{"pg_name": name, "pg_desc": desc, "ranks": ranks} for name, desc, ranks in groups or []]
        self.about = {
            "schemaVersion": 1,
            "deviceProperties": [{"name": "NVIDIA H200"}],
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world, "pg_config": config},
            "host_name": host,
            "baseTimeNanoseconds": base,
        }

    def span(self, name, start, end, category="user_annotation", thread=1, **arguments):
        self.events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": 1,
                "tid": thread,
                "ts": start,
                "dur": end - start,
                "args": arguments,
            }
        )

    def kernel(self, name, start, end, launched=None, stream=7, operator=None, **arguments):
        """A kernel, the call that launched it, and the operator that made the call: (name, dims, dtype)."""
        self.number += 1
        launched = start - 5 if launched is None else launched
        external = 1000 + self.number
        if operator:
            of, dims, dtype = operator
            more = {"External id": external, "Input Dims": dims, "Input type": [dtype] * len(dims)}
            self.span(of, launched - 1, launched + 3, "cpu_op", **more)
        self.span(
            "cudaLaunchKernel",
            launched,
            launched + 2,
            "cuda_runtime",
            **{"correlation": self.number, "External id": external},
        )
        self.span(name, start, end, "kernel", stream, correlation=self.number, stream=stream, **arguments)

    def collective(self, kind, start, end, elements, ranks, group="0", launched=None, dtype="BFloat16"):
        facts = {"Collective name": kind, "In msg nelems": elements, "Out msg nelems": elements, "dtype": dtype,
                 "Group size": len(ranks), "Process Group Name": group, "Process Group Ranks": json.dumps(ranks)}  # fmt: skip
        self.kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", start, end, launched, 20, **facts)

    def write(self, folder, name=None):
        rank = self.about["distributedInfo"]["rank"]
        path = folder / (name or f"rank-{rank}.json")
        text = json.dumps(self.about | {"traceEvents": self.events})
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(text.encode()))
        else:
            path.write_text(text)
        return path
