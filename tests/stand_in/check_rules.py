"""Breaks rules of captures on purpose: each must be told, or refused by torch itself. Run as run_modes.py."""

import torch

from tests.stand_in.plausible import counts


def breaks(name, function, told: bool = True) -> None:
    stream, refused = torch.cuda.Stream(), False
    before = counts()["violations"]
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
            function()
    except RuntimeError as error:
        refused = True
        print(f"  ({str(error).splitlines()[0]})")
    found = counts()["violations"] - before
    how = f"{found} told" + (", and torch refuses it" if refused else "")
    print(f"{'ok' if (found > 0 or refused) is told else 'MISSED'}: {name}: {how}", flush=True)


x = torch.arange(4, device="cuda")
pinned, event, other = torch.empty(4, dtype=torch.int64, pin_memory=True), torch.cuda.Event(), torch.cuda.Stream()
x + 1
event.record()


def fork(join: bool) -> None:
    here = torch.cuda.current_stream()
    other.wait_stream(here)
    with torch.cuda.stream(other):
        x.add(1)
    if join:
        here.wait_stream(other)


def past() -> None:
    with torch.cuda.stream(torch.cuda.default_stream()):
        x.add_(1)


def recorded() -> None:
    mark = torch.cuda.Event()
    mark.record()
    mark.synchronize()


breaks("kernels", lambda: x + 1, told=False)
breaks("a copy to pinned memory", lambda: pinned.copy_(x, non_blocking=True), told=False)
breaks("a fork that is joined", lambda: fork(True), told=False)
breaks("a fork that is not joined", lambda: fork(False))
breaks("a read (tolist)", lambda: x.tolist())
breaks("a copy from pageable memory", lambda: x.copy_(torch.arange(4)))
breaks("a wait for the device", torch.cuda.synchronize)
breaks("a wait for an event of outside", event.synchronize)
breaks("a wait for an event of the capture", recorded)
breaks("a stream that waits for an event of outside", lambda: torch.cuda.current_stream().wait_event(event))
breaks("a query of an event", event.query)
breaks("a launch past the capture", past)
breaks("pinning memory", lambda: torch.cuda.cudart().cudaHostRegister(torch.empty(4096).data_ptr(), 4096, 0))
graph, stays = torch.cuda.CUDAGraph(), torch.empty(1 << 22, dtype=torch.uint8, device="cuda")
with torch.cuda.graph(graph):
    stays.copy_(torch.empty_like(stays))
del stays
torch.cuda.empty_cache()
before = counts()["violations"]
graph.replay()
print("ok:" if counts()["violations"] > before else "MISSED:", "a replay that copies to freed memory")
