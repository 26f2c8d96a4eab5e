"""How a driver outside an engine's processes has each rank inside carry out receiver operations. Shared by the integrations.

The engine's public calls reach every rank alike but carry little: they name an operation, whose input lies in a private
directory on the node (``directory``); ranks answer there by file (``endpoint``, ``operations``). ``driver`` is the outer end.
Knows no engine.
"""

from deltarefit.integrations.exchange.calls import EngineCalls, JsonServer, ServerRefusalError, run_in_loop
from deltarefit.integrations.exchange.driver import ExchangeDriver
from deltarefit.integrations.exchange.endpoint import RankEndpoint
from deltarefit.integrations.exchange.layout import PostLoadWatch, changed_after_load
from deltarefit.integrations.exchange.operations import RankOperations, RawTensor, named_state

__all__ = [
    "EngineCalls",
    "ExchangeDriver",
    "JsonServer",
    "PostLoadWatch",
    "RankEndpoint",
    "RankOperations",
    "RawTensor",
    "ServerRefusalError",
    "changed_after_load",
    "named_state",
    "run_in_loop",
]
