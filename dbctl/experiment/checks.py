"""What one key of an experiment says against another.

Rules of this file: a check sees the values that could be read, by dotted path, and stays silent
about those that could not: their own fault is reported already. So every fault of a file comes at
once, and none twice. Whether a request can be placed is for plan; this is only the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from math import prod
from typing import Any, NamedTuple
from unicodedata import category

from dbctl.experiment.specs import EvaluateSpec, PartitionSpec, StopSpec
from dbctl.experiment.tree import Path
from dbctl.model.cut import cut_fault
from dbctl.model.network import NetworkSpec
from dbctl.optim.batch import LineSearchSpec, c2_of
from dbctl.optim.schedules import ScheduleSpec
from dbctl.region import Box

Values = dict[Path, Any]

WITHOUT_FILE = {
    "digits": "it is part of dbctl, and so on every host already",
    "synthetic": "every host makes its rows from the seed",
}
MOST_ELEMENTS = 1 << 59  # of 8 bytes each: every count of bytes fits in 64 bits
_BAD_CATEGORIES = ("Cc", "Cs", "Zl", "Zp")  # control, half a pair, line and paragraph ends


class Fault(NamedTuple):
    path: Path
    message: str


def faults(values: Values) -> Iterator[Fault]:
    """Everything wrong between the keys of one experiment."""
    for check in _CHECKS:
        yield from check(values)


def _name(values: Values) -> Iterator[Fault]:
    name = values.get(("name",))
    if not isinstance(name, str):
        return
    bad = next((c for c in name if c == "/" or category(c) in _BAD_CATEGORIES), None)
    if bad is not None:
        what = "a `/`" if bad == "/" else f"the character U+{ord(bad):04X}"
        yield Fault(("name",), f"expected a name that can be a directory's, found {what} in it")
    elif name.startswith(".") or name != name.strip():
        message = "expected a name that does not start with a dot, nor start or end with a space"
        yield Fault(("name",), message)
    elif len(name.encode()) > 255:
        yield Fault(("name",), f"expected at most 255 bytes of UTF-8, found {len(name.encode())}")


def _schedules(values: Values) -> Iterator[Fault]:
    for path, value in values.items():
        if not isinstance(value, ScheduleSpec):
            continue
        if value.type == "inverse_time" and value.factor is not None:
            yield Fault((*path, "factor"), "inverse_time takes no factor; remove it")
        if value.type != "inverse_time" and value.factor is None:
            message = f"is required by type {value.type}: expected a number greater than 0"
            yield Fault((*path, "factor"), message)


def _sources(values: Values) -> Iterator[Fault]:
    for split in ("train", "test"):
        path = ("data", split)
        if values.get((*path, "scale")) is not None and values.get((*path, "standardize")) is True:
            message = "expected scale or standardize, found both; remove one"
            yield Fault((*path, "standardize"), message)
            return
    # Measuring rows that were prepared otherwise than those trained on says nothing.
    train = values.get(("data", "train", "standardize"))
    test = values.get(("data", "test", "standardize"))
    if train is not None and test is not None and train != test:
        message = f"expected {str(train).lower()} as in data.train, found {str(test).lower()}"
        yield Fault(("data", "test", "standardize"), message)


def _ship(values: Values) -> Iterator[Fault]:
    for split in ("train", "test"):
        path = ("data", split)
        source = values.get((*path, "source"))
        if values.get((*path, "ship")) is True and source in WITHOUT_FILE:
            message = f"{source} needs none: {WITHOUT_FILE[source]}; remove it"
            yield Fault((*path, "ship"), message)


def _stop(values: Values) -> Iterator[Fault]:
    stop = values.get(("stop",))
    if isinstance(stop, StopSpec) and stop == StopSpec():
        message = "expected at least one of epochs, steps, seconds, test_accuracy, found none"
        yield Fault(("stop",), message)


def _evaluation(values: Values) -> Iterator[Fault]:
    evaluate = values.get(("evaluate",))
    evaluates = isinstance(evaluate, EvaluateSpec) and evaluate.every is not None
    off = isinstance(evaluate, EvaluateSpec) and evaluate.every is None
    no_test = ("data", "test") in values and values["data", "test"] is None
    accuracy = ("stop", "test_accuracy")
    if values.get(accuracy) is not None and no_test:
        yield Fault(accuracy, "needs data.test, which the file does not give")
    if values.get(accuracy) is not None and off:
        yield Fault(accuracy, "needs evaluate, which is off; add `evaluate: {every: 1 epoch}`")
    if evaluates and no_test:
        message = "needs data.test, which the file does not give; add it, or `evaluate: off`"
        yield Fault(("evaluate",), message)


def _replicas(values: Values) -> Iterator[Fault]:
    replicas, least = values.get(("replicas",)), values.get(("min_replicas",))
    if replicas is not None and least is not None and least > replicas:
        message = f"expected at most the number of replicas, {replicas}, found {least}"
        yield Fault(("min_replicas",), message)
    if values.get(("optimizer", "type")) == "sgd" and replicas is not None and replicas > 1:
        message = f"expected 1 with type sgd, found {replicas}; type downpour takes more"
        yield Fault(("replicas",), message)


def _line_search(values: Values) -> Iterator[Fault]:
    path = ("optimizer", "line_search")
    search, method = values.get(path), values.get(("optimizer", "method"))
    if isinstance(search, LineSearchSpec) and method is not None:
        c2 = c2_of(search, method)
        if search.c1 >= c2:
            message = f"expected less than c2, {c2:g}, found {search.c1:g}"
            yield Fault((*path, "c1"), message)


def _shapes(values: Values) -> Iterator[Fault]:
    """Each layer on the nodes of the one below; the first that cannot stand hides those above."""
    shape, path = values.get(("network", "input")), ("network", "layers")
    if shape is None:
        return
    n_tensors = n_parameters = 0
    index = 0
    while (layer := values.get((*path, str(index)))) is not None:
        fault = layer.fault(shape)
        if fault is not None:
            key, message = fault
            yield Fault((*path, str(index), key), message)
            return
        nodes = layer.output_shape(shape)
        tensors = layer.tensors(shape, Box.whole(nodes))
        n_tensors += len(tensors)
        n_parameters += sum(prod(tensor.shape) for tensor in tensors)
        for count, what in ((prod(nodes), "nodes"), (n_parameters, "parameters up to here")):
            if count > MOST_ELEMENTS:
                message = f"expected at most {MOST_ELEMENTS:,} (2^59), found {count:,}"
                yield Fault((*path, str(index)), f"{what}: {message}")
                return
        shape = nodes
        index += 1
    if path not in values:
        return
    if n_tensors == 0:
        yield Fault(path, "expected a layer with parameters, such as dense, found none")
    elif len(shape) != 1:
        message = f"expected outputs in one row, found nodes of shape {list(shape)} at the end"
        yield Fault((*path, str(index - 1), "type"), f"{message}; add a dense layer")


def _partition(values: Values) -> Iterator[Fault]:
    """How a replica is cut, once its network stands."""
    network, partition = values.get(("network",)), values.get(("partition",))
    if not isinstance(network, NetworkSpec) or not isinstance(partition, PartitionSpec):
        return
    if any(_shapes(values)):
        return
    fault = cut_fault(network, count=partition.count, grid=partition.grid)
    if fault is not None:
        key, message = fault
        yield Fault(("partition", key), message)


def _loss(values: Values) -> Iterator[Fault]:
    loss, layers = values.get(("network", "loss")), values.get(("network", "layers"))
    if loss not in ("softmax", "logistic") or not layers:
        return
    last = layers[-1]
    path = ("network", "layers", str(len(layers) - 1))
    activation = getattr(last, "activation", "linear")
    if activation != "linear":
        message = f"expected linear in the last layer: loss {loss} has its own, found {activation}"
        yield Fault((*path, "activation"), message)
    if loss == "softmax" and getattr(last, "units", 2) < 2:
        message = f"expected at least 2 in the last layer with loss softmax, found {last.units}"
        yield Fault((*path, "units"), f"{message}; one output is loss logistic")


# ------------------------------------------------------------------------------------------ hosts

# ssh itself gives user and host to a shell for some settings (ProxyCommand), so there is no
# character here that any shell takes for more than itself.
HOST_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}"
_USER = r"[A-Za-z0-9_][A-Za-z0-9_.+-]*"
_SSH_HOST = r"[A-Za-z0-9_][A-Za-z0-9_.-]*|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]+"
_IN_URI = r"[A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+\]"
SSH_DESTINATION = (
    rf"(?:{_USER}@)?(?:{_SSH_HOST})|ssh://(?:{_USER}@)?(?:{_IN_URI})(?::[0-9]{{1,5}})?"
)
_WITH_PORT = rf"(?:{_USER}@)?(?:{_IN_URI}):[0-9]{{1,5}}"  # as other programs take it
_DESTINATIONS = "HOST, USER@HOST, ssh://USER@HOST:PORT"
_DNS_NAME = r"[A-Za-z0-9]([A-Za-z0-9_-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9_-]*[A-Za-z0-9])?)*"
MAX_ENV = 8_192  # what is told a host goes into a pipe without waiting
_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*=[^\0]*"


def _hosts(values: Values) -> Iterator[Fault]:
    seen: dict[str, int] = {}
    for path, value in values.items():
        if path[:2] != ("cluster", "hosts") or len(path) != 4 or value is None:
            continue
        key = path[3]
        if message := _host_fault(key, value):
            yield Fault(path, message)
        elif key == "name":
            first = seen.setdefault(value, int(path[2]))
            if first != int(path[2]):
                yield Fault(path, f"expected another name, hosts.{first} is called `{value}` too")


def _host_fault(key: str, value: Any) -> str:
    """What is wrong with one value of a host, or ""."""
    if key == "name" and not re.fullmatch(HOST_NAME, value):
        return "expected up to 63 letters, digits and `_.-`, the first a letter or digit"
    if key == "ssh" and not re.fullmatch(SSH_DESTINATION, value):
        meant = f"; write `ssh://{value}`" if re.fullmatch(_WITH_PORT, value) else ""
        return f"expected what ssh calls a destination: {_DESTINATIONS}{meant}"
    if key == "address":
        return _address_fault(value)
    if key in ("python", "workdir"):
        if value.startswith("-"):
            return "expected a path, found a dash at its beginning; write ./ before it"
        if any(category(c) in _BAD_CATEGORIES for c in value):
            return "expected a path, found a control character in it"
        if value.startswith("~") and not value.startswith("~/"):
            return "expected a path; of a home directory only ~/, that of the user there"
    if key == "env":
        if sum(map(len, value)) > MAX_ENV:
            return f"expected at most {MAX_ENV:,} characters in all, found {sum(map(len, value)):,}"
        for variable in value:
            if not re.fullmatch(_VARIABLE, variable, flags=re.DOTALL):
                return "expected each to be NAME=VALUE, of letters, digits and `_` before the `=`"
    return ""


def _address_fault(value: str) -> str:
    try:
        if ip_address(value).is_unspecified:
            return "expected an address of that host, found the one that means all of them"
    except ValueError:
        # What has only digits and dots would be an address, and is none.
        if not re.fullmatch(_DNS_NAME, value) or not re.search(r"[A-Za-z]", value):
            return "expected an IPv4 address, an IPv6 address or a name, without a port"
    return ""


_CHECKS: tuple[Callable[[Values], Iterator[Fault]], ...] = (
    _name,
    _schedules,
    _sources,
    _ship,
    _stop,
    _evaluation,
    _replicas,
    _line_search,
    _shapes,
    _partition,
    _loss,
    _hosts,
)
