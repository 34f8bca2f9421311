"""The released code where it parts from the paper's text: `python -m official.fdse` and so on.

A file has only what differs: flags that switch single differences, and subclasses of the paper's Client and
Server, which copy what they change. The paper's file has no hook for it. The default is --variant official,
the release's settings; --variant paper has the paper's.
"""
