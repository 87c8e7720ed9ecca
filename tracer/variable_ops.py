"""Variable operations: those that read or write variables, whose order segments preserve."""

from __future__ import annotations

VARIABLE_OPS = frozenset(
    {"ReadVariableOp", "AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp", "VariableShape",
     "ResourceGather", "ResourceGatherNd", "ResourceScatterAdd", "ResourceScatterSub", "ResourceScatterUpdate",
     "ResourceScatterMin", "ResourceScatterMax", "ResourceScatterNdAdd", "ResourceScatterNdSub",
     "ResourceScatterNdUpdate", "ResourceScatterNdMin", "ResourceScatterNdMax", "ResourceStridedSliceAssign",
     "RngReadAndSkip"}
)  # fmt: skip

READS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape"})  # those that write nothing

# Operations of optimizers: each updates a variable and its slots.
OPTIMIZER_OPS = frozenset(
    {"ResourceApplyAdadelta", "ResourceApplyAdagradV2", "ResourceApplyAdam", "ResourceApplyCenteredRMSProp",
     "ResourceApplyGradientDescent", "ResourceApplyKerasMomentum", "ResourceApplyMomentum", "ResourceApplyRMSProp"}
)  # fmt: skip


# Those that update some rows, which only a graph runs, on the variables themselves.
SPARSE_OPTIMIZER_OPS = frozenset(
    {"ResourceSparseApplyAdadelta", "ResourceSparseApplyAdagrad", "ResourceSparseApplyAdagradV2",
     "ResourceSparseApplyCenteredRMSProp", "ResourceSparseApplyFtrl", "ResourceSparseApplyFtrlV2",
     "ResourceSparseApplyKerasMomentum", "ResourceSparseApplyMomentum", "ResourceSparseApplyRMSProp"}
)  # fmt: skip

ROW_UPDATES = SPARSE_OPTIMIZER_OPS | {
    "ResourceScatterAdd", "ResourceScatterSub", "ResourceScatterUpdate", "ResourceScatterMin", "ResourceScatterMax",
    "ResourceScatterNdAdd", "ResourceScatterNdSub", "ResourceScatterNdUpdate", "ResourceScatterNdMin",
    "ResourceScatterNdMax", "ResourceStridedSliceAssign",
}  # fmt: skip


def is_variable_op(op: str) -> bool:
    """Returns whether `op` is one of these."""
    return op in VARIABLE_OPS or op in OPTIMIZER_OPS or op in SPARSE_OPTIMIZER_OPS
