"""Personalized federated learning with all clients stacked on one accelerator."""

from fedjax_pfl.algorithms import build, registry
from fedjax_pfl.data.clients import ClientData, client_data
from fedjax_pfl.engine.cohort import Cohort, Participation, everyone
from fedjax_pfl.engine.federation import Algorithm, Env, Federation
from fedjax_pfl.engine.rounds import rollout
from fedjax_pfl.engine.simulate import NonFiniteError, Progress, Result, simulate
from fedjax_pfl.engine.simulation import Record, Simulation
from fedjax_pfl.models.model import Model, flax_model, function_model

__version__ = "0.1.0"

__all__ = [
    "Algorithm", "ClientData", "Cohort", "Env", "Federation", "Model", "NonFiniteError", "Participation", "Progress",
    "Record", "Result", "Simulation", "__version__", "build", "client_data", "everyone", "flax_model",
    "function_model", "registry", "rollout", "simulate",
]  # fmt: skip
