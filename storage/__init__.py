"""Bytes at rest: object stores, the shard format and its codecs, data sets, the compile cache. Knows no Prefect."""
