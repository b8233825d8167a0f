"""Frames between a TUN device and the switch process: how a frame is read, its destination, and what it costs on the wire.

The kernel hands over a packet before it cuts it into frames of the link's size (segmentation offload), up to 64 KiB in one piece:
one system call in place of forty. A header of 10 bytes before each packet (`virtio_net_hdr`) has the size of the cuts; it is passed
on unchanged, so that the receiving kernel treats the packet as the sending one did. On the wire each frame has separate headers.
"""

from __future__ import annotations

import fcntl
import os
import struct

from meshwright.comm.emulate.topology import INTERFACE

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
CHECKSUM, SEGMENTATION_V4 = 0x01, 0x02  # offloads: the kernel may leave both to the device
OFFLOAD_HEADER = struct.Struct("=BBHHHH")  # flags, kind, header bytes, bytes of one cut, checksum start and offset
ETHERNET_BYTES = 14
MAX_FRAME = OFFLOAD_HEADER.size + 65536
TCP, ACK_FLAG = 6, 0x10
MAX_ACKNOWLEDGEMENT = OFFLOAD_HEADER.size + 60 + 60  # the largest headers of IP and TCP
ADDRESS_AT = OFFLOAD_HEADER.size + 16  # of the IPv4 destination


def open_tun() -> int:
    """Make the network device of a node in the namespace of this thread, and return its file. It lives as long as the file is
    open."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR
        fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), flags))
        fcntl.ioctl(file, TUNSETOFFLOAD, CHECKSUM | SEGMENTATION_V4)
    except BaseException:
        os.close(file)
        raise
    return file


def destination(frame: bytes) -> bytes | None:
    """The four bytes of the IPv4 address of a frame's destination; None for another protocol or a frame that is too short."""
    if len(frame) < ADDRESS_AT + 4 or frame[OFFLOAD_HEADER.size] >> 4 != 4:
        return None
    return frame[ADDRESS_AT : ADDRESS_AT + 4]


def wire_bytes(frame: bytes) -> int:
    """Bytes of a frame on an Ethernet wire: its data, and the headers of every cut."""
    _, kind, headers, cut, _, _ = OFFLOAD_HEADER.unpack_from(frame)
    size = len(frame) - OFFLOAD_HEADER.size
    if not kind or not cut:
        return size + ETHERNET_BYTES
    data = size - headers
    return data + -(-data // cut) * (headers + ETHERNET_BYTES)


def is_acknowledgement(frame: bytes) -> bool:
    """Whether a frame is a TCP acknowledgement without data: it may overtake data without harm."""
    if len(frame) > MAX_ACKNOWLEDGEMENT or len(frame) < OFFLOAD_HEADER.size + 40:
        return False
    ip = OFFLOAD_HEADER.size
    tcp = ip + (frame[ip] & 0x0F) * 4
    if frame[ip + 9] != TCP or len(frame) < tcp + 20:
        return False
    return len(frame) == tcp + (frame[tcp + 12] >> 4) * 4 and frame[tcp + 13] == ACK_FLAG
