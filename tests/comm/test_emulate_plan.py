"""The emulated cluster as data: its shape, where ranks run, and when the switch process delivers a frame. No rights needed."""

import socket
import stat
import struct

import pytest

from meshwright.comm.emulate import measure, page, state, switch, system
from meshwright.comm.emulate.emulation import Emulation, take_down, tcp_settings
from meshwright.comm.emulate.switch import BACKLOG_S, Switch
from meshwright.comm.emulate.topology import Topology, address, parse_between, places
from meshwright.errors import MeshwrightError

RATE, DELAY = 25e6, 1e-3


@pytest.mark.parametrize(
    ("text", "rate", "delay"), [("200Mb/s,1ms", 25e6, 1e-3), ("1Gb/s", 125e6, 0.0), (" 10MB/s , 50us ", 10e6, 5e-5)]
)
def test_rate_and_delay_are_parsed(text: str, rate: float, delay: float) -> None:
    assert parse_between(text) == (rate, pytest.approx(delay))


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "MW-EMU-002"),
        (",1ms", "MW-EMU-002"),
        ("1Gb/s,", "MW-EMU-002"),
        ("fast", "MW-UNIT-001"),
        ("1Gb/s,1m", "MW-UNIT-002"),
    ],
)
def test_what_is_not_a_rate_and_a_delay_is_refused(text: str, code: str) -> None:
    with pytest.raises(MeshwrightError) as refused:
        parse_between(text)
    assert refused.value.code == code


@pytest.mark.parametrize(
    "fields",
    [
        {"nodes": 0},
        {"nodes": 65},
        {"ranks_per_node": 0},
        {"nodes": 64, "ranks_per_node": 5},
        {"rate": 1.0},
        {"delay": 2.0},
        {"delay": float("nan")},
        {"oversubscription": 0.5},
        {"oversubscription": float("nan")},
        {"nodes_per_switch": 3},
        {"nodes": 1, "oversubscription": 2.0},
        {"oversubscription": 2.0, "nodes_per_switch": 4},
    ],
)
def test_shapes_that_cannot_be_made_are_refused(fields: dict) -> None:
    with pytest.raises(MeshwrightError) as refused:
        Topology(**{"nodes": 4, "ranks_per_node": 2, "rate": RATE, "delay": DELAY, **fields})
    assert refused.value.code == "MW-EMU-002"
    assert refused.value.fix


def test_the_uplink_is_shared() -> None:
    t = Topology(4, 2, RATE, DELAY, oversubscription=3)
    assert (t.nodes_per_switch, t.switches, t.uplink) == (2, 2, pytest.approx(2 * RATE / 3))
    assert t.links(0, 1) == [("out", 0), ("in", 1)]
    assert t.links(1, 2) == [("out", 1), ("up", 0), ("down", 1), ("in", 2)]
    data = 1448 / 1514
    found = measure.patterns(t)
    assert t.rate_between(found["alone"]) == pytest.approx(RATE * data)
    assert t.rate_between(found["ring"]) == pytest.approx(t.uplink * data)  # one flow leaves each switch
    assert t.rate_between(found["across"]) == pytest.approx(RATE / 3 * data)
    assert "across" in found
    assert measure.patterns(Topology(4, 2, RATE))["across"] == []
    assert measure.patterns(Topology(1, 2, RATE)) == {"alone": [], "ring": [], "across": []}


def test_ranks_are_placed_in_blocks_or_round_robin() -> None:
    blocks = [(p.node, p.local_rank) for p in places(2, 3, "blocks")]
    assert blocks == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert [(p.node, p.local_rank) for p in places(2, 3, "round-robin")] == [
        (0, 0),
        (1, 0),
        (0, 1),
        (1, 1),
        (0, 2),
        (1, 2),
    ]
    with pytest.raises(MeshwrightError, match="round-robin"):
        list(places(2, 2, "round robin"))


def frame(target: int, data: int = 1448, cut: int = 0, flags: int = 0x18) -> bytes:
    """A TCP packet as a TUN device hands it over; `cut` bytes of data go into one frame on the wire."""
    offload = switch.OFFLOAD_HEADER.pack(1, 1 if cut else 0, 52, cut, 20, 16)
    ip = struct.pack(
        "!BBHHHBBH4s4s", 0x45, 0, 0, 0, 0, 64, 6, 0, socket.inet_aton(address(0)), socket.inet_aton(address(target))
    )
    tcp = struct.pack("!HHIIBBHHH12x", 1, 2, 0, 0, 8 << 4, flags, 0, 0, 0)
    return offload + ip + tcp + bytes(data)


def test_bytes_on_the_wire() -> None:
    assert switch.wire_bytes(frame(1)) == 1514
    assert switch.wire_bytes(frame(1, 10 * 1448, cut=1448)) == 10 * 1514
    assert switch.wire_bytes(frame(1, 1448 + 1, cut=1448)) == 1514 + 66 + 1
    assert switch.destination(frame(2)) == socket.inet_aton(address(2))
    assert switch.destination(b"short") is None
    assert switch.destination(bytes(60)) is None  # not IPv4


def test_acknowledgements_are_recognised() -> None:
    assert switch.is_acknowledgement(frame(1, 0, flags=0x10))
    assert not switch.is_acknowledgement(frame(1, 1, flags=0x10))
    assert not switch.is_acknowledgement(frame(1, 0, flags=0x12))  # SYN
    assert not switch.is_acknowledgement(frame(1))


def deliveries(switch: Switch) -> list[tuple[float, int]]:
    return [(time, node) for time, _, node, _ in sorted(switch.waiting)]


def test_a_frame_is_delivered_after_its_time_on_the_slowest_link_and_the_delay() -> None:
    switch = Switch(Topology(4, 1, RATE, DELAY, oversubscription=4), [0] * 4)
    assert switch.admit(0, frame(1), now=10.0) == pytest.approx(1514 / RATE)
    switch.admit(2, frame(0), now=10.0)  # over uplinks of half the rate
    assert deliveries(switch) == [
        (pytest.approx(10.0 + 1514 / RATE + DELAY), 1),
        (pytest.approx(10.0 + 2 * 1514 / RATE + DELAY), 0),
    ]


def test_frames_to_one_node_wait_for_each_other_and_other_nodes_do_not() -> None:
    switch = Switch(Topology(4, 1, RATE, DELAY), [0] * 4)
    for sender in (1, 2, 3):
        behind = switch.admit(sender, frame(0, 10 * 1448, cut=1448), now=0.0)
        assert behind == pytest.approx(15140 / RATE)  # the sender's own link is free again after its frame
    switch.admit(0, frame(3), now=0.0)
    times = [time for time, _ in deliveries(switch)]
    expected = [1514, 15140, 2 * 15140, 3 * 15140]
    assert times == [pytest.approx(size / RATE + DELAY) for size in expected]


def test_acknowledgements_overtake_data_and_use_the_link() -> None:
    switch = Switch(Topology(2, 1, RATE, DELAY), [0] * 2)
    switch.admit(0, frame(1, 40 * 1448, cut=1448), now=0.0)
    switch.admit(0, frame(1, 0, flags=0x10), now=0.0)
    first = deliveries(switch)[0]
    assert first == (pytest.approx(66 / RATE + DELAY), 1)
    assert switch.free_at["out", 0] == pytest.approx((40 * 1514 + 66) / RATE)


def test_frames_to_strangers_are_dropped() -> None:
    switch = Switch(Topology(2, 1, RATE), [0] * 2)
    for other in (frame(7), frame(0), b"", bytes(100)):
        assert switch.admit(0, other, now=0.0) == 0.0
    assert switch.waiting == []
    assert BACKLOG_S > 0


def test_the_window_fills_the_link() -> None:
    for topology in (Topology(2, 1, RATE, DELAY), Topology(2, 1, 1e9, 0.05)):
        window = int(tcp_settings(topology)["net/ipv4/tcp_rmem"].split()[2]) / 2
        assert window >= 2 * topology.rate * topology.round_trip


def measurement(share: float) -> measure.LinkMeasurement:
    rate = measure.Rate("ring", 4, RATE, share * RATE, RATE)
    return measure.LinkMeasurement(2e-3, 2.2e-3, 2.3e-3, (rate,))


def test_a_rate_that_the_machine_cannot_carry_is_refused_with_one_that_it_can() -> None:
    emulation = Emulation(Topology(4, 2, RATE, DELAY))
    page.check_carried(emulation, measurement(0.9))
    with pytest.raises(MeshwrightError) as refused:
        page.check_carried(emulation, measurement(0.4))
    assert (refused.value.code, refused.value.exit_code) == ("MW-EMU-012", 3)
    rate, delay = parse_between(refused.value.fix.removeprefix("--between "))
    assert (rate, delay) == (pytest.approx(80e6 / 8), DELAY)
    assert any("90%" in note for note in page.notes(emulation, measurement(0.9)))


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    monkeypatch.setattr(state.os, "geteuid", lambda: state.os.stat(tmp_path).st_uid)
    folder = tmp_path / "meshwright"
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(state, "runtime_folder", lambda: folder)
    return folder


def test_the_state_is_readable_by_its_owner_only_and_leaves_nothing(runtime) -> None:
    record = {"phase": "up", "topology": {}, "namespaces": [], "switch": None}
    state.write("a1", record)
    assert stat.S_IMODE(state.state_file("a1").stat().st_mode) == 0o600
    assert (state.read("a1"), state.names()) == (record, ["a1"])
    with state.locked("a1", "use", shared=True), state.locked("a1", "use", shared=True) as both:
        assert both
        with state.locked("a1", "use", wait=False) as free:
            assert not free
    with state.locked("a1", "use", wait=False) as free:
        assert free
    state.remove("a1")
    assert list(runtime.iterdir()) == []
    assert state.read("a1") is None


def test_a_damaged_state_file_is_an_error(runtime) -> None:
    for text in ("{", "[]", '{"phase": "up"}'):
        state.state_file("a1").write_text(text)
        with pytest.raises(MeshwrightError) as refused:
            state.read("a1")
        assert refused.value.code == "MW-EMU-011"


def test_without_the_rights_nothing_is_made(monkeypatch, runtime) -> None:
    def refusal() -> MeshwrightError:
        with pytest.raises(MeshwrightError) as refused:
            Emulation(Topology(2, 1, RATE), "norights").up()
        assert refused.value.code == "MW-EMU-001"
        assert list(runtime.iterdir()) == []
        return refused.value

    monkeypatch.setattr(system.sys, "platform", "linux")
    monkeypatch.setattr(system, "find_tool", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(system, "effective_capabilities", lambda: 1 << system.NET_ADMIN)
    assert "CAP_SYS_ADMIN missing" in str(refusal())
    monkeypatch.setattr(system, "find_tool", lambda name: None)
    assert "install iproute2" in refusal().fix
    monkeypatch.setattr(system.sys, "platform", "darwin")
    assert "Linux" in refusal().what


def test_names_that_could_mean_another_are_refused(runtime) -> None:
    for name in ("", "a-1", "UP", "a" * 13, "../x"):
        with pytest.raises(MeshwrightError, match="MW-EMU-002"):
            Emulation(Topology(2, 1, RATE), name)
        with pytest.raises(MeshwrightError, match="MW-EMU-002"):
            take_down(name)
    with pytest.raises(MeshwrightError, match="Valid: auto, kernel, process"):
        Emulation(Topology(2, 1, RATE), links="user")
