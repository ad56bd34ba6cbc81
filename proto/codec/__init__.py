"""The only code that touches generated protobuf modules: values ↔ messages, errors ↔ google.rpc.Status, and the RPC table.

Everybody else calls and serves RPCs of :mod:`kvferry.proto.codec.api` in the vocabulary's own types.
"""
