"""Bytes on the wire of every dispatcher against the minimum: forward and backward of one MoE layer.

The dispatchers' own code runs on 8 to 64 ranks, threads of this process, over groups that count the bytes leaving each
rank (``moefw.testing.counting``). Sizes are those of DeepSeek-V3: bf16 rows of 7168, 8 of 256 experts, uniform routing
and 4 of 8 groups; nodes of 4 and of 8 ranks. To add a dispatcher, put it with its options into ``DISPATCHERS``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from attrs import asdict, frozen
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed import ProcessGroup

import record
from dispatchers import dispatch_assembly
from minima import Scheme, distinct, inside
from moefw.compose.assembly import Assembly
from moefw.compose.build import Shared
from moefw.testing.counting import Link, Movement, Sent, Traffic
from moefw.testing.threads import thread_world
from moefw.testing.wire import count_bytes, open_dispatcher

DISPATCHERS: dict[str, dict[str, Any]] = {
    "allgather": {},
    "alltoall": {},
    "deepep": {"backend": "torch"},
    "hybridep": {"backend": "torch"},
}
DIM = 7168
EXPERTS = 256
TOP_K = 8
ROW_BYTES = 2 * DIM
SCHEMES = {
    "uniform": Scheme(num_experts=EXPERTS, top_k=TOP_K),
    "4 of 8 groups": Scheme(num_experts=EXPERTS, top_k=TOP_K, groups=8, limit=4),
}
RANKS = (8, 16, 32, 64)
NODES = (4, 8)
PASSES: dict[str, tuple[Movement, Movement]] = {
    "forward": ("dispatch", "combine"),
    "backward": ("combine_backward", "dispatch_backward"),
}
WAY_BACK: tuple[Movement, ...] = ("combine", "combine_backward")
ALLOWED_RATIO = 1.01
ALLOWED_METADATA = 0.03


@frozen(kw_only=True)
class Case:
    """One routing over one arrangement of ranks."""

    routing: str
    ranks: int
    ranks_per_node: int
    ids_by_rank: Sequence[Tensor]

    @property
    def tokens(self) -> int:
        """Return the number of tokens of all ranks."""
        return sum(map(len, self.ids_by_rank))

    def fewest(self) -> dict[str, float]:
        """Return the fewest rows a token, counted for these ids: to ranks, to nodes, inside nodes."""
        ids = self.ids_by_rank
        nodes = self.ranks // self.ranks_per_node
        rows = {
            "ranks": distinct(ids, num_experts=EXPERTS, num_units=self.ranks),
            "nodes": distinct(ids, num_experts=EXPERTS, num_units=nodes),
            "inside": inside(ids, num_experts=EXPERTS, ranks_per_node=self.ranks_per_node),
            "inside, any way in": inside(ids, num_experts=EXPERTS, ranks_per_node=self.ranks_per_node, by_rail=False),
        }
        return {name: count / self.tokens for name, count in rows.items()}

    def expected(self) -> dict[str, float]:
        """Return the fewest rows a token as the closed forms expect them."""
        scheme = SCHEMES[self.routing]
        nodes = self.ranks // self.ranks_per_node
        ranks = scheme.between(self.ranks)
        between = scheme.between(nodes)
        rows = {"ranks": ranks, "nodes": between, "inside": scheme.within(self.ranks, self.ranks_per_node)}
        return {**rows, "inside, any way in": ranks - between}


def main() -> None:
    """Measure, print and write ``results/wire_bytes.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16, help="tokens a rank")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    arguments = parser.parse_args()
    began = time.monotonic()
    results = []
    for case in cases(arguments.ranks, arguments.tokens):
        found = {name: bytes_of(name, case) for name in DISPATCHERS}
        results.append({**described(case), "dispatchers": found})
        print(f"{case.routing}, {case.ranks} ranks, nodes of {case.ranks_per_node}: {time.monotonic() - began:.0f} s")
    show(results)
    goals = judged(results)
    for goal in goals:
        print(f"{'met' if goal['met'] else 'MISSED'}: {goal['goal']} (worst {goal['worst']:.4f})")
    shape = {"model_dim": DIM, "dtype": "bf16", "experts": EXPERTS, "top_k": TOP_K, "tokens_per_rank": arguments.tokens}
    measured = {"shape": shape, "unit": "bytes a token", "goals": goals, "cases": results}
    print(record.write("wire_bytes", measured))


def cases(ranks: Iterable[int], tokens: int) -> Iterator[Case]:
    for routing, scheme in SCHEMES.items():
        for size in ranks:
            generator = torch.Generator().manual_seed(size)
            ids = [scheme.draw(tokens, generator=generator) for _ in range(size)]
            for each in NODES:
                yield Case(routing=routing, ranks=size, ranks_per_node=each, ids_by_rank=ids)


def described(case: Case) -> dict[str, Any]:
    rounded = {
        key: {name: round(rows, 4) for name, rows in found.items()}
        for key, found in (("fewest_rows", case.fewest()), ("expected_rows", case.expected()))
    }
    return {"routing": case.routing, "ranks": case.ranks, "ranks_per_node": case.ranks_per_node, **rounded}


def bytes_of(name: str, case: Case) -> dict[str, dict[Link, dict[str, float]]]:
    """Return bytes a token of payload and metadata, by movement and link."""
    assembly = dispatch_assembly(
        name, ep=case.ranks, num_experts=EXPERTS, top_k=TOP_K, dim=DIM, options=DISPATCHERS[name]
    )
    counted = thread_world(case.ranks, on_a_rank, assembly, case, timeout_s=300.0)
    totals: dict[Movement, dict[Link, Sent]] = {}
    for traffic in counted:
        for movement, links in traffic.by_link(case.ranks_per_node).items():
            so_far = totals.setdefault(movement, {"node": Sent(), "network": Sent()})
            totals[movement] = {link: so_far[link] + sent for link, sent in links.items()}
    return {
        movement: {
            link: {kind: round(total / case.tokens, 1) for kind, total in asdict(sent).items()}
            for link, sent in links.items()
        }
        for movement, links in totals.items()
    }


def on_a_rank(group: ProcessGroup, rank: int, assembly: Assembly, case: Case) -> Traffic:
    shared = Shared()
    dispatcher = open_dispatcher(assembly, group, ranks_per_node=case.ranks_per_node, shared=shared)
    ids_TK = case.ids_by_rank[rank]
    x_TD = torch.full((len(ids_TK), DIM), 0.5, dtype=torch.bfloat16)
    counted = count_bytes(dispatcher, group, x_TD, torch.ones(ids_TK.shape), ids_TK)
    dispatcher.close()
    shared.close()
    return counted


Found = dict[str, dict[Link, dict[str, float]]]


def payload(found: Found, movements: Iterable[Movement], link: Link) -> float:
    return sum(found[movement][link]["payload"] for movement in movements)


def metadata_share(found: Found) -> float:
    totals = {kind: sum(sent[kind] for links in found.values() for sent in links.values()) for kind in asdict(Sent())}
    return totals["metadata"] / totals["payload"]


def ratios(result: dict[str, Any], found: Found) -> dict[str, float]:
    """Return the payload of forward and backward over the fewest bytes: to ranks, to nodes, inside nodes."""
    everything = [movement for movements in PASSES.values() for movement in movements]
    network, node = (payload(found, everything, link) / ROW_BYTES / len(everything) for link in ("network", "node"))
    sent = {"ranks": network + node, "nodes": network, "inside": node}
    fewest = result["fewest_rows"]
    return {name: rows / fewest[name] for name, rows in sent.items() if fewest[name]}


def judged(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each goal, the worst value of all cases, and whether it is met."""

    def worst(name: str, against: str) -> float:
        found = (ratios(result, result["dispatchers"][name]).get(against, 1.0) for result in results)
        return max(found)

    every = [(name, found) for result in results for name, found in result["dispatchers"].items()]
    deduplicating = [found for name, found in every if name in ("deepep", "hybridep")]
    back = max(sent["metadata"] for _, found in every for way in WAY_BACK for sent in found[way].values())
    values = [
        ("deepep payload / distinct (token, rank)", worst("deepep", "ranks"), ALLOWED_RATIO),
        ("hybridep payload between nodes / distinct (token, node)", worst("hybridep", "nodes"), ALLOWED_RATIO),
        ("hybridep payload inside nodes / rows that must cross there", worst("hybridep", "inside"), ALLOWED_RATIO),
        ("deepep, hybridep metadata / payload", max(map(metadata_share, deduplicating)), ALLOWED_METADATA),
        ("bytes of metadata a token in combine and its backward", back, 0.0),
    ]
    return [
        {"goal": f"{goal} <= {allowed}", "worst": round(value, 5), "met": value <= allowed}
        for goal, value, allowed in values
    ]


def show(results: Sequence[dict[str, Any]]) -> None:
    """Print KB a token by link, the ratios to the minimum, and the minimum that the closed forms expect.

    The minimum inside nodes assumes that a token enters a node only once. Other dispatchers get no ratio.
    """
    for routing in SCHEMES:
        table = Table(
            title=f"{routing}: payload in KB a token, by link; x: over the fewest bytes; expected: closed form"
        )
        for heading in ("ranks", "a node", "dispatcher"):
            table.add_column(heading)
        figures = ("network fwd", "bwd", "node fwd", "bwd", "x ranks", "x nodes", "x inside", "metadata %")
        for heading in figures:
            table.add_column(heading, justify="right")
        for result in (result for result in results if result["routing"] == routing):
            where = str(result["ranks"]), str(result["ranks_per_node"])
            for name, found in result["dispatchers"].items():
                table.add_row(*where, name, *_figures(result, found))
            for label in ("fewest_rows", "expected_rows"):
                rows = result[label]
                both = [f"{2 * rows[way] * ROW_BYTES / 1e3:.1f}" for way in ("nodes", "nodes", "inside", "inside")]
                table.add_row(*where, label.removesuffix("_rows"), *both, f"({rows['ranks']:.3f} rows)", style="dim")
            table.add_section()
        Console(width=130).print(table)


def _figures(result: dict[str, Any], found: Found) -> list[str]:
    kilobytes = [
        f"{payload(found, movements, link) / 1e3:.1f}" for link in ("network", "node") for movements in PASSES.values()
    ]
    over = ratios(result, found)
    if over.get("nodes", 1.0) > ALLOWED_RATIO:
        del over["inside"]
    return [
        *kilobytes,
        *(f"{over[name]:.3f}" if name in over else "-" for name in ("ranks", "nodes", "inside")),
        f"{metadata_share(found):.2%}",
    ]


if __name__ == "__main__":
    main()
