"""The conventions of the control API, read off the compiled descriptors and the sources' names.

They are those of buf's standard category that hold for one folder of files.
"""

import importlib
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FileDescriptor, ServiceDescriptor

ROOT = Path(__file__).resolve().parents[3]
SOURCES = sorted((ROOT / "proto").glob("*.proto"))
PASCAL = re.compile(r"([A-Z][a-z0-9]*)+")
LOWER_SNAKE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
UPPER_SNAKE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")


def _file(source: Path) -> FileDescriptor:
    module = importlib.import_module(f"kvferry.proto.{source.stem}_pb2")
    descriptor = module.DESCRIPTOR
    assert isinstance(descriptor, FileDescriptor)
    return descriptor


FILES = [_file(source) for source in SOURCES]
each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)


def _messages(file: FileDescriptor) -> Iterator[Descriptor]:
    pending = list(file.message_types_by_name.values())
    while pending:
        message = pending.pop()
        if not message.GetOptions().map_entry:
            yield message
        pending.extend(message.nested_types)


def _enums(file: FileDescriptor) -> Iterator[EnumDescriptor]:
    yield from file.enum_types_by_name.values()
    for message in _messages(file):
        yield from message.enum_types


def _services(file: FileDescriptor) -> Iterator[ServiceDescriptor]:
    yield from file.services_by_name.values()


def _upper_snake(pascal: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", pascal).upper()


def test_there_are_sources() -> None:
    assert SOURCES


@each_file
def test_a_file_has_the_versioned_package_a_snake_case_name_and_its_import_path(file: FileDescriptor) -> None:
    folder, name = file.name.rsplit("/", 1)
    assert file.package == "kvferry.v1"
    assert folder == "kvferry/proto"
    assert LOWER_SNAKE.fullmatch(name.removesuffix(".proto"))


@each_file
def test_names_have_their_case(file: FileDescriptor) -> None:
    for message in _messages(file):
        assert PASCAL.fullmatch(message.name)
        for field in message.fields:
            assert LOWER_SNAKE.fullmatch(field.name), field.full_name
    for service in _services(file):
        assert all(PASCAL.fullmatch(method.name) for method in service.methods)


@each_file
def test_enum_values_carry_the_enum_s_name_and_zero_says_nothing(file: FileDescriptor) -> None:
    for enum in _enums(file):
        assert PASCAL.fullmatch(enum.name)
        prefix = _upper_snake(enum.name)
        assert enum.values_by_number[0].name == f"{prefix}_UNSPECIFIED"
        for value in enum.values:
            assert UPPER_SNAKE.fullmatch(value.name)
            assert value.name.startswith(f"{prefix}_")
        assert len(enum.values_by_number) == len(enum.values), f"{enum.full_name} has aliases"


@each_file
def test_a_service_ends_in_service_and_a_method_has_a_request_and_a_response_of_its_name(file: FileDescriptor) -> None:
    for service in _services(file):
        assert service.name.endswith("Service")
        for method in service.methods:
            assert method.input_type.name == f"{method.name}Request"
            assert method.output_type.name == f"{method.name}Response"


def test_no_request_or_response_serves_two_methods() -> None:
    methods = [method for file in FILES for service in _services(file) for method in service.methods]
    uses = Counter(kind.full_name for method in methods for kind in (method.input_type, method.output_type))
    assert [name for name, count in uses.items() if count > 1] == []


def test_every_message_of_a_request_s_or_response_s_name_belongs_to_a_method() -> None:
    methods = {method.name for file in FILES for service in _services(file) for method in service.methods}
    names = {message.name for file in FILES for message in _messages(file) if message.name.endswith(("Request", "Response"))}
    assert names == {f"{method}{end}" for method in methods for end in ("Request", "Response")}


def test_services_and_methods_are_documented() -> None:
    for source in SOURCES:
        lines = source.read_text().splitlines()
        for before, line in zip(["", *lines], lines, strict=False):
            if re.match(r"\s*(service|rpc) ", line):
                assert before.strip().startswith("//"), f"{source.name}: {line.strip()}"


def test_the_import_contract_protects_every_generated_module() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    protected = {name for contract in contracts if contract["type"] == "protected" for name in contract["protected_modules"]}
    assert {f"kvferry.proto.{source.stem}_pb2" for source in SOURCES} <= protected
