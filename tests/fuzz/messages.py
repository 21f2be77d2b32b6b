"""Protobuf messages at random: whole ones, and valid ones with a little changed, which get further.

Everything is drawn from a `random.Random`: hypothesis hands out one that it shrinks, the coverage-guided fuzzer seeds
one.
"""

import string
import struct
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message

# Limits of the wire's types, of ours, and what lies around zero.
_NUMBERS = (0, 1, 2, 3, 4, 15, 16, 17, 63, 64, 65, 128, 1023, 1024, 1025, 65_536, 1 << 20, -1, -2)
_EXTREMES = {32: (2**31 - 1, -(2**31), 2**32 - 1), 64: (2**63 - 1, -(2**63), 2**64 - 1, 2**53)}
_FLOATS = (
    0.0,
    -0.0,
    1.0,
    0.5,
    2.0,
    -1.0,
    1e-6,
    1e-300,
    1e300,
    -100.0,
    100.0,
    float("nan"),
    float("inf"),
    -float("inf"),
)
_TEXTS = ("", "a", "b", "a.1", "x" * 120, "x" * 128, "x" * 129, "a/b", "\0", "\n", "ä", "\u202e\U0010ffff", "{", "user")
_RANGES = {
    Field.CPPTYPE_INT32: (32, -(2**31), 2**31 - 1),
    Field.CPPTYPE_UINT32: (32, 0, 2**32 - 1),
    Field.CPPTYPE_INT64: (64, -(2**63), 2**63 - 1),
    Field.CPPTYPE_UINT64: (64, 0, 2**64 - 1),
}
_DEPTH = 4


def random_message(dice: Random, kind: type[Message]) -> Message:
    """A message of any content: fields present or absent, arrays of wrong lengths, numbers at their ends."""
    made = kind()
    _fill(dice, made, _DEPTH)
    return made


def mutate(dice: Random, message: Message, changes: int = 0) -> None:
    """Changes one to three fields, anywhere in the message."""
    for _ in range(changes or dice.randint(1, 3)):
        _mutate_once(dice, message)


def random_bytes(dice: Random) -> bytes:
    """What may stand in a field of bytes: arrays of small and of impossible numbers, whole and cut."""
    count = dice.choice((0, 1, 2, 3, 4, 5, 16, 65))
    match dice.randrange(5):
        case 0:
            data = struct.pack(f"<{count}i", *(dice.randrange(16) for _ in range(count)))
        case 1:
            data = struct.pack(f"<{count}i", *(_number(dice, Field.CPPTYPE_INT32) for _ in range(count)))
        case 2:
            data = struct.pack(f"<{count}f", *(_float32(dice) for _ in range(count)))
        case 3:
            data = struct.pack(f"<{count}d", *(dice.choice(_FLOATS) for _ in range(count)))
        case _:
            data = bytes(dice.randrange(256) for _ in range(count))
    return data[: -dice.randrange(1, 4)] if dice.randrange(8) == 0 else data


def random_text(dice: Random) -> str:
    """Ids, names, words and odd characters; never a lone surrogate, which no message can hold."""
    if dice.randrange(3):
        return dice.choice(_TEXTS)
    return "".join(dice.choice(string.printable + "é\u0300\u200b🙂") for _ in range(dice.randrange(12)))


def _fill(dice: Random, message: Message, depth: int) -> None:
    for field in message.DESCRIPTOR.fields:
        if dice.randrange(2):
            _set(dice, message, field, depth)


def _set(dice: Random, message: Message, field: Any, depth: int) -> None:
    """Gives the field a random value, or many."""
    if _is_map(field):
        target, (key, value) = getattr(message, field.name), field.message_type.fields
        for _ in range(dice.choice((1, 2, 5))):
            target[_value(dice, key)] = _value(dice, value)
    elif field.is_repeated:
        for _ in range(dice.choice((1, 1, 2, 3, 20))):
            if field.message_type is None:
                getattr(message, field.name).append(_value(dice, field))
            elif depth:
                _fill(dice, getattr(message, field.name).add(), depth - 1)
    elif field.message_type is not None:
        getattr(message, field.name).SetInParent()
        if depth:
            _fill(dice, getattr(message, field.name), depth - 1)
    else:
        setattr(message, field.name, _value(dice, field))


def _mutate_once(dice: Random, message: Message) -> None:
    set_fields = [field for field, _ in message.ListFields()]
    inner = [field for field in set_fields if field.message_type is not None and not _is_map(field)]
    if inner and dice.randrange(4):
        field = dice.choice(inner)
        child = getattr(message, field.name)
        if not field.is_repeated:
            _mutate_once(dice, child)
            return
        if dice.randrange(3):
            _mutate_once(dice, dice.choice(child))
            return
    if not message.DESCRIPTOR.fields:
        return
    field = dice.choice(set_fields if set_fields and dice.randrange(3) else message.DESCRIPTOR.fields)
    action = dice.randrange(4)
    if action == 0:
        message.ClearField(field.name)
    elif field.is_repeated and not _is_map(field) and len(getattr(message, field.name)):
        _mutate_list(dice, message, field)
    elif field.type == Field.TYPE_BYTES and action == 1 and getattr(message, field.name):
        setattr(message, field.name, _spoilt(dice, getattr(message, field.name)))
    else:
        _set(dice, message, field, 1)


def _mutate_list(dice: Random, message: Message, field: Any) -> None:
    values = getattr(message, field.name)
    place = dice.randrange(len(values))
    match dice.randrange(4):
        case 0:
            del values[place]
        case 1:
            values.extend([values[place]] * dice.choice((1, 2, 17)))
        case 2 if field.message_type is None:
            values[place] = _value(dice, field)
        case _:
            _set(dice, message, field, 1)


def _spoilt(dice: Random, data: bytes) -> bytes:
    """An array with an element changed, one too few, one too many, or half of one."""
    place = dice.randrange(len(data))
    match dice.randrange(4):
        case 0:
            return data[:place]
        case 1:
            return data + data[:4]
        case 2:
            start = place // 4 * 4
            return data[:start] + struct.pack("<i", _number(dice, Field.CPPTYPE_INT32)) + data[start + 4 :]
        case _:
            return data[:place] + bytes([dice.randrange(256)]) + data[place + 1 :]


def _value(dice: Random, field: Any) -> Any:
    match field.cpp_type:
        case Field.CPPTYPE_STRING:
            return random_bytes(dice) if field.type == Field.TYPE_BYTES else random_text(dice)
        case Field.CPPTYPE_BOOL:
            return bool(dice.randrange(2))
        case Field.CPPTYPE_FLOAT:
            return _float32(dice)
        case Field.CPPTYPE_DOUBLE:
            return dice.choice(_FLOATS)
        case Field.CPPTYPE_ENUM:
            known = [value.number for value in field.enum_type.values]
            return dice.choice(known) if dice.randrange(4) else _number(dice, Field.CPPTYPE_INT32)
        case kind:
            return _number(dice, kind)


def _number(dice: Random, kind: int) -> int:
    bits, low, high = _RANGES[kind]
    value = dice.choice(_EXTREMES[bits]) if dice.randrange(4) == 0 else dice.choice(_NUMBERS)
    return value if low <= value <= high else high


def _float32(dice: Random) -> float:
    value = dice.choice(_FLOATS)
    return value if abs(value) < 3e38 or value != value or value in (float("inf"), -float("inf")) else 3e38


def _is_map(field: Any) -> bool:
    return bool(field.message_type is not None and field.message_type.GetOptions().map_entry)
