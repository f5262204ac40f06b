"""Checks that a log of `ingot eval --ttt --ttt-log` records an honest score.

    python3 tools/check_adaptation.py LOG [REPORT.json]     REPORT: the output of the same command with --json

For each document: its chunks are scored in order, each once and next to the previous chunk; each chunk is scored with adapters that had made
exactly as many updates as chunks had been scored before; an update follows its chunk's score; the last chunk causes no update. No target is in
two documents. With REPORT: targets and loss equal the log's.
"""
import json
import math
import sys


def check(events, report=None):
    """Returns (documents, chunks, targets, sum of losses); raises ValueError with the wrong line."""
    state, total, targets, chunks = {}, {}, 0, 0
    if not events:
        raise ValueError("found no event, expected the scores of at least one document")
    for number, event in enumerate(events, 1):
        def require(holds, what):
            if not holds:
                raise ValueError(f"line {number}: {what}: {json.dumps(event)}")
        document, chunk = event["document"], event["chunk"]
        of = state.setdefault(document, {"scored": 0, "learnt": 0, "first": event["first"], "end": event["first"]})
        if event["event"] == "score":
            require(chunk == of["scored"], f"found chunk {chunk}, expected {of['scored']}")
            require(of["learnt"] == of["scored"], "the chunk before was not learnt from, so it was the document's last")
            require(event["updates"] == chunk, f"scored after {event['updates']} updates, expected {chunk}")
            require(event["first"] == of["end"] < event["end"], f"found targets from {event['first']}, expected {of['end']}")
            require(math.isfinite(event["loss_sum"]), "found a loss that is not finite")
            of["scored"], of["end"] = chunk + 1, event["end"]
            total.setdefault(document, []).append(event["loss_sum"])
            targets, chunks = targets + event["end"] - event["first"], chunks + 1
        else:
            require(event["event"] == "update", "found neither a score nor an update")
            require(chunk == of["learnt"] and of["scored"] == chunk + 1, f"learnt from chunk {chunk} before its score, or twice")
            require(event["updates"] == chunk + 1, f"found {event['updates']} updates, expected {chunk + 1}")
            of["learnt"] = chunk + 1
    for document, of in state.items():
        if of["learnt"] != of["scored"] - 1:
            raise ValueError(f"document {document}: found {of['learnt']} updates for {of['scored']} chunks, expected one less")
    spans = sorted((of["first"], of["end"], document) for document, of in state.items())
    for (_, end, before), (first, _, document) in zip(spans, spans[1:]):
        if first < end:
            raise ValueError(f"document {document}: found targets from {first}, which document {before} has up to {end}")
    loss = math.fsum(x for sums in total.values() for x in sums)
    if report is not None:
        if report["targets"] != targets or report["documents"] < len(state):
            raise ValueError(f"found {targets} targets of {len(state)} documents, expected {report['targets']} of {report['documents']}")
        if abs(loss / targets - report["loss"]) > 1e-9 * abs(report["loss"]):
            raise ValueError(f"found a mean loss of {loss / targets}, expected {report['loss']}")
    return len(state), chunks, targets, loss


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: check_adaptation.py LOG [REPORT.json]")
    try:
        with open(sys.argv[1]) as file:
            events = [json.loads(line) for line in file]
        documents, chunks, targets, loss = check(events, json.load(open(sys.argv[2])) if len(sys.argv) > 2 else None)
    except (OSError, ValueError) as error:
        sys.exit(f"{sys.argv[1]}: {error}")
    except (KeyError, TypeError) as error:
        sys.exit(f"{sys.argv[1]}: found no log or report of `ingot eval --ttt`, expected one: {error}")
    print(f"{sys.argv[1]}: {documents} documents, {chunks} chunks, {targets} targets, mean loss {loss / max(targets, 1):.6f}: "
          "each scored before it was learnt from")


if __name__ == "__main__":
    main()
