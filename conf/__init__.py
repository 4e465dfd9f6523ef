"""YAML only. This file exists so that `pkg://stoker.conf` resolves."""
