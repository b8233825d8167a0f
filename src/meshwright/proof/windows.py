"""The sequences of token files in plain numpy, and which of them a training must have read.

A source of N sequences is read in epochs: its draws 0 … N − 1 are all its sequences, in any order, and so are the next N. Of K draws from a mixture a
source with the share p has K·p, to within one for each source. So a sample that is read twice or left out is seen without knowing the order.

    packed       sequence j has the inputs t[jS … jS + S − 1] and the targets t[jS + 1 … jS + S] of the stream t of all documents
    not packed   each document alone, cut into pieces of S and padded
    masks        the target that is the first token of another document is ignored
    learned      of conversations, a target that is not learned is ignored
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from meshwright.describe.config import Config
from meshwright.training.data.sources import Documents, training_documents, validation_documents

IGNORED = -100
MOST_TOKENS = 2**23  # of a source that is read whole
Rows = Iterator[np.ndarray]


def stream(part: Documents) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The tokens of all documents, one after the other, the number of the document of each, and whether it is learned."""
    lengths = np.diff(part.ends)
    learned = np.ones(len(part.file.tokens)) if part.file.learned is None else part.file.learned
    tokens, mask = (
        np.concatenate([array[a : a + n] for a, n in zip(part.starts, lengths, strict=True)])
        for array in (part.file.tokens, learned)
    )
    return tokens.astype(np.int64), np.repeat(np.arange(len(lengths)), lengths), mask == 1


def windows(part: Documents, seq: int, pack: bool, masked: bool) -> Rows:
    """Every sequence of a source: inputs, targets and, with document masks, document numbers from 0 on."""
    tokens, numbers, learned = stream(part)
    cuts = [(0, len(tokens))] if pack else zip(part.ends[:-1], part.ends[1:], strict=True)
    for first, end in cuts:
        for start in range(first, end - 1, seq):
            stop = min(start + seq, end - 1)
            if pack and stop - start < seq:
                break  # the last, incomplete sequence of the stream
            size, row = stop - start, np.zeros((3, seq), np.int64)
            row[0, :size], row[1, :size], row[1, size:] = tokens[start:stop], tokens[start + 1 : stop + 1], IGNORED
            row[1, :size][~learned[start + 1 : stop + 1]] = IGNORED
            row[2, :size] = numbers[start:stop] - numbers[start]
            row[2, size:] = numbers[stop] - numbers[start] + 1
            if masked:
                row[1, :size][numbers[start + 1 : stop + 1] != numbers[start:stop]] = IGNORED
            yield row if masked else row[:2]


def misread(config: Config, reads: Sequence[np.ndarray], part: str) -> Iterator[str]:
    """What is wrong with the samples that were read from the token files of a configuration, in words; `part`: training or validation."""
    data, seq = config.data, config.workload.seq
    sources = training_documents(data) if part == "training" else validation_documents(data)
    if max(source.tokens for source in sources) > MOST_TOKENS:
        return
    counts = [Counter(row.tobytes() for row in windows(s, seq, data.pack, data.document_mask)) for s in sources]
    rows = [np.ascontiguousarray(row, np.int64).tobytes() for row in reads]
    origins = [[i for i, count in enumerate(counts) if row in count] for row in rows]
    if unknown := sum(not origin for origin in origins):
        yield f"{unknown} {part} samples are not sequences of the token files"
    if part == "validation" and len(rows) > sum(count.total() for count in counts):
        yield "an evaluation reads more samples than there are"
    weights = data.weights if part == "training" and data.weights else [source.tokens for source in sources]
    for i, count in enumerate(counts):
        if any(i in origin and len(origin) > 1 for origin in origins):
            continue  # a sequence that two files have
        own, size = [row for row, origin in zip(rows, origins, strict=True) if origin == [i]], count.total()
        if part == "training" and abs(len(own) - len(rows) * weights[i] / sum(weights)) > len(sources):
            yield f"{len(own)} of {len(rows)} samples are of file {i + 1}, which is not its weight"
        for start in range(0, len(own), max(size, 1)):
            if twice := Counter(own[start : start + size]) - count:
                yield f"{twice.total()} {part} samples were read twice in an epoch, and as many left out"


def shared_documents(config: Config) -> bool:
    """Whether training and validation share a document, or a document is in neither."""
    data = config.data
    if not data.validation:
        return False
    for training, validation in zip(training_documents(data), validation_documents(data), strict=True):
        starts = np.sort(np.concatenate((training.starts, validation.starts)))
        if not np.array_equal(starts, training.file.offsets[:-1]):
            return True
    return False
