"""The roce transport over the contract double of b12x (tests/unit/roce/stand_in.py), in every process of an engine."""


def register() -> None:
    from dsv41_dist.comm import create
    from tests.unit.roce.stand_in import Faults, HostRoceTransport

    stock = create.transport_class
    create.transport_class = lambda name: HostRoceTransport if name == "roce" else stock(name)
    Faults.wait_s = 60.0  # four ranks on two cores
