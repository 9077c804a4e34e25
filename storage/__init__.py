"""Bytes at rest: object stores, shards and their codecs, data sets, the compile cache. Knows no Prefect."""
