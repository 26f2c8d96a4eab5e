"""The conformance table: bare models of each engine, refitted and compared with fresh loads; what came of every tensor.

``make conformance`` runs it in every engine's environment and writes ``docs/conformance.json`` and the page made from it;
``deltarefit doctor --engine`` runs it for one engine that is installed. Engines keep configuration in globals, so groups of
cases run in processes of their own.
"""
