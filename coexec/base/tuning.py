"""Tuning: holds every threshold, timeout, limit and budget of the package, with its unit and the measurement behind it.

Code reads `tuning.name` where it needs a value, and never copies it at import, so that `tuned(name=value)` changes it
within a scope, on all threads. Constants of formats and algorithms (a file's version, Philox' words) are not here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Tuning:
    """The values in use. Times were measured on two cores of an AMD EPYC unless a comment says otherwise."""

    # Whether following a function pays (`dispatch/profitability`).

    # Doubt at which a function is timed: a call that met something new adds two, any other call subtracts one. In the
    # first followed call everything is new, and in the second some.
    doubt_before_timing: float = 4
    # Calls that met nothing new after which some are timed without a doubt, so that reports know eager's time: 0 is
    # never, and `python -m coexec run` has the other.
    calm_before_timing: int = 0
    run_calm: int = 4
    # From then on, the net cost of following, in imperative calls, at which it backs off. Before, it has cost 3 to 9,
    # mostly for observing the Python of library calls.
    following_patience: float = 4.0
    # The same if calls that met nothing new took less than this share of an imperative one. (A step with two ways to
    # mix its images costs 9 more until both paths are learnt, by its tenth call, and takes 0.11 in the steady state;
    # with a patience of 3 it ran imperatively for good. So did gradients accumulated over three calls, which take 0.1.)
    promising_share: float = 0.75
    promising_patience: float = 12.0
    # Calls in a row on known paths after which the same holds before the first that meets nothing new. (A step of 6 ms
    # with two alternating paths backed off for 150 calls in the very call in which the second was compiled.)
    promising_recurrence: int = 2
    # The cost counted is capped at this for a call on a new path whose predecessor was on a known one: alternating
    # paths are few, and a call on a long one is no loss on a short one.
    following_new_path: float = 2.0
    # The cap for a call on known paths that learnt, compiled or validated something: that is done once, and only for
    # what has recurred. (A Hamiltonian sampler's step with six gradients takes 4, 6, then 0.15.)
    following_compiled: float = 1.0
    # A call is progress if its cost over an imperative one is at most this share of the previous followed call's: while
    # calls are recorded, observed and compiled, each costs less than the one before.
    following_progress: float = 0.75
    # Imperative calls' worth of savings that count: slow calls may use them up.
    following_allowance: int = 12
    # Consecutive calls that run imperatively while backing off: at least, and at most.
    min_backoff: int = 32
    max_backoff: int = 512
    # Share of the time that the calls followed between two back-offs may cost over imperative ones.
    tries_share: float = 0.02
    # Imperative calls whose times are kept, and followed calls between the first two of them, doubling each time: two
    # calls in a row may both hit a busy moment, and a path that seems slow would never be followed again. They are as
    # many times further apart where following takes less than `promising_share` of the time.
    plain_calls_kept: int = 8
    plain_calls_apart: int = 2
    plain_calls_apart_fast: int = 6
    # Calls differ in size if one has so many times as many operations as another, or took so many times as long. Then
    # more imperative ones are timed before following is given up. (A step that skipped a batch in its first timed call,
    # in 0.1 ms instead of 8, ran imperatively for 32 calls, though followed it takes 0.25 of eager's time. With three
    # timed in a row at first, gradients accumulated over three calls were learnt later: calls 10 to 30 took 0.65 of
    # eager's time, and 0.14 with one.)
    varied_calls: float = 2.0
    # Calls take about the same time whose numbers of operations differ by no more than so many, or by this factor. (The
    # size of an imperative call is known to some 10 %. A step of which every fourth call trains, once a buffer is full,
    # was compared with those that do not: 390 of 400 calls ran imperatively.)
    alike_calls: float = 1.25
    alike_operations: int = 8
    # Imperative calls that are timed in a row where that is done without a doubt.
    asked_calls_timed: int = 3
    # Operations per launch; with fewer, following may well cost more than it saves.
    worthwhile_launch: int = 16

    # Batching (`batching`).

    # Whether all calls are batched, for tests.
    batches_all: bool = False
    # Calls of a trial, and the share of an imperative call's time that their median must stay below. (The first
    # ones run operation by operation, and trace.)
    batching_trial: int = 8
    batching_share: float = 0.85
    # Imperative calls' times that a trial may cost before it ends.
    batching_patience: float = 6.0
    # Imperative calls after a trial that did not pay, four times as many after each, to the longest. (With a patience
    # of six calls, the first trial costs 2.3 % of the calls up to the second.)
    batching_rest: int = 256
    batching_longest_rest: int = 16384
    # Batched calls after which an imperative one is timed again, doubling.
    batching_apart: int = 16
    # Seconds that a program of groups takes operation by operation before it is traced, forwards and backwards apart.
    # (A trace takes 20 to 50 ms: what comes rarely is not traced, and what comes often costs about twice its trace.)
    batching_worth: float = 0.015
    # Tensors in a list from which on they are one input, gathered at once, and not an input each.
    batching_items: int = 4
    # Elements beyond which a tensor from outside is shared by the instances that take it, and not copied for each.
    batching_row: int = 4096
    # Positions at which one slice of the program has taken rows, from which on positions are data, and no new kinds.
    batching_positions: int = 3
    # Kinds of operations, and programs, beyond which all that batching has learnt of a function is forgotten.
    batching_kinds: int = 4096
    batching_programs: int = 512

    # Arguments of ever-changing sizes (`dispatch/shape_policy`).

    # Combinations of sizes that are followed at their first visit. A new one costs three to eight imperative calls,
    # mostly in its first two: Keras' Python is observed, shapes are inferred, operations are wired again. One that
    # occurs only once would never amortize that. Three are needed before a path can be followed at any size
    # (`reduce_retracing`), and some calls differ from others in more than sizes.
    sizes_at_once: float = 1
    sizes_before_any: int = 5  # the same with `reduce_retracing`
    # Combinations that are followed at their second visit. The others wait until they are frequent, or until following
    # has saved as much: with eight that were followed at once, the first thirty calls on sequences of ever-changing
    # lengths took 2.2 times as long as eager's; now they take 1.4 to 1.5 times as long.
    sizes_followed: float = 3
    # Visits after which any other one is followed: by then, following would have amortized its cost.
    size_often: int = 4
    # The same, once following other combinations has saved as much as this one costs.
    size_soon: int = 1
    # First calls of a combination, which are an investment and do not count for or against following.
    size_invested: int = 2
    # New combinations in a row in which nothing was to be learnt, after which all are followed: what differs in size is
    # not what operations are given, such as a list that a loop goes through.
    sizes_of_no_matter: int = 3
    max_sizes: int = 4096  # combinations
    # Of a segment on a path for any size: visits at the same sizes after which XLA may compile for these, and for how
    # many combinations of sizes.
    frequent_visits: int = 8
    frequent_sizes: int = 8
    # Of an open dimension: sizes, other than those that a path was fitted to, at which a memoized call must have agreed
    # with runs of its Python before it is skipped at any; and how many are remembered.
    proven_sizes: int = 2
    max_proven_sizes: int = 64
    max_compared_sizes: int = 32  # dimensions that have differed, each pair of which is compared
    first_calls: int = 4  # of a function: what is learnt in them is no new way, and `explain()` does not list it
    size_depth: int = 3  # levels of nested arguments that are inspected
    size_items: int = 64  # items per container that are inspected

    # Memory of the trace graph (`dispatch/controller`), in nodes and steps.

    max_graph: int = 50_000  # of one function, which then starts over
    graph_room: int = 40_000  # beyond, new sizes add no paths, so that the known ones stay fast

    # What is kept for reports (`base/stats`, `debug/nan_watch`).

    max_causes: int = 200  # listed by `explain`
    max_segments_told: int = 1000
    log_lines: int = 20  # of one topic
    log_seconds: float = 10.0  # in so many seconds
    pace_calls: int = 64  # calls whose mean is what a call takes
    # Seconds that a cut costs: one launch more, 16 us of XLA's and 80 us of a graph, and Python waits for the values.
    cut_seconds: float = 5e-5
    nan_values_shown: int = 6  # per input, in a message

    # Calls of any function (`guards/watch`, `memoize/redirect`).

    # Calls of a helper that are neither skipped nor learnt, in a row, after which it is called directly.
    helper_misses: int = 24
    max_helpers: int = 10_000  # that are known at a time
    # Calls of helpers are watched after this many steady calls of the function, if they follow as many
    # operations one by one, for this share of the time that calls take; a watched call takes some thirty times as long.
    watched_from: int = 32
    watched_operations: int = 16
    watched_share: float = 0.2
    watched_idle: int = 24  # calls without a watched one, after which there is nothing left to learn
    watched_calls: float = 20.0  # steady calls' time, after which watching one call is given up,
    watched_in_all: float = 100.0  # and after which the function's calls are watched no more
    watched_worth: float = 0.95  # the most that calls may then take, as a multiple of before
    watched_known: int = 64  # known objects in a row, newest first, behind which no new ones are looked for
    max_guards: int = 4000  # of one call: 20 to 50 ns each
    watched_depth: int = 8  # levels of containers that are read as a whole
    watched_array: int = 64  # numbers in an array that are compared on every call
    # Bytes of an array that code of the program's in a memoized call looks at, such as a mask: compared on every call,
    # which takes 0.4 us for 4 KiB, and 2 for 32.
    max_compared_bytes: int = 1 << 15

    # Compilation (`launch/executor`, `launch/backend_race`, `compile`). An eager operation takes 6-10 us; a launch of a
    # TensorFlow graph 80 us, mostly for waking TensorFlow's threads; a launch of an XLA executable 16 us, but compiling
    # it 30 ms and up to 20 ms per operation.

    launch_visits: int = 2  # visits before a segment is compiled
    launch_operations: int = 8  # smaller segments are never launched as a graph
    # Seconds per operation that a segment must have taken before XLA compiles it.
    xla_price: float = 2e-3
    xla_at_once: bool = False  # whether XLA is tried first, synchronously
    xla_soon_visits: int = 4  # visits before XLA compiles where Keras would have used XLA from the start
    # Every executable is compared with its operations at its first launch, which takes a tenth of the time of compiling
    # it. (Tests turn this off to see the compiled values.)
    validates_new: bool = True
    # Of graphs that have only operations which were compared in other graphs of the function, one in so many. (A
    # decoder that takes the true word or its own at each of six steps has 64 paths, and needed 150 calls to learn them
    # at twice their time.)
    validates_recombined: int = 4
    # An operation takes 0.2 ms to emit and compile, and saves 10 us per launch. Programs whose paths keep changing
    # would do little else. So, beyond an allowance in seconds, compiling takes no more than this share of the time
    # since the first call, except for segments with many visits.
    compile_allowance: float = 5.0
    compile_share: float = 0.2
    compile_often: int = 32  # visits
    # The tensors used after a cut may differ between calls; after this many widenings, all tensors are returned.
    max_widenings: int = 4
    # Executables of one function, and their operations, at some 7 KB each; beyond, the least recently launched are
    # evicted, and compiled again if needed.
    max_executables: int = 1000
    max_compiled_operations: int = 100_000
    # TensorFlow never frees XLA's code (0.5 to 2 MiB for some tens of operations). So segments that end at one place,
    # in ever-changing shapes, get this many XLA executables; the others run as graphs.
    max_xla_shapes: int = 16
    # Bytes of a segment's inputs: to compile in the background XLA is launched on as many bytes of temporaries, and to
    # validate a segment takes as many for copies of its variables.
    max_validated_bytes: int = 1 << 30
    # Numbers of a tensor that validation compares, evenly spaced.
    validated_numbers: int = 1 << 20
    # Bytes of variables of which a segment updates some rows in place: beyond, neither XLA nor validation, which copy
    # them. (A step that changes 256 rows of 51 MB takes 2 ms eagerly, and took 20 where it copied them.)
    max_copied_tables: int = 1 << 22
    # How often an XLA executable's predicates may be false where no operation fails eagerly (a cast that wraps around).
    max_alarms: int = 4
    # The backend race: launches of each backend, alternating, after one unmeasured launch each, until one is faster in
    # this share of the pairs, since any launch may be slow on a busy machine.
    race_trials: int = 5
    race_most: int = 25
    race_clear: float = 0.8
    race_margin: float = 0.95  # XLA must win by more than what equal code differs by on a busy machine
    # Operations: for larger segments, the saving by rerolling is computed once a share of XLA's price has been paid.
    many_operations: int = 256
    folded_hope: int = 8  # that share is 1 / folded_hope
    max_functions: int = 256  # graph functions per decorated function, counted by the specs of their inputs
    # A sequence of small kernels is faster on the calling thread, up to this mean size of their results, in bytes: of
    # the steps of `make bench`, an MLP's (2 KiB) took 0.86 of the time, a DQN's (2) 0.81, an LSTM's (9) 0.87, and a
    # GPT's (109) 1.16.
    fine_grain: int = 1 << 14
    # Launches of such a graph by name, before it is called inline, which saves 30 us a launch but takes half as long
    # again to prepare. The third call of `module_with_own_adam` took 36 ms of CPU time and not 43, of
    # `recommenders_two_towers` 46 and not 55, of `wgan_gp` 174 and not 191: medians of five runs each, in turns, of
    # `python -m examples.ecosystem --program=NAME --calls=6 --clock=cpu --json=FILE`.
    launches_by_name: int = 200
    max_families: int = 64  # shape-polymorphic forms per function
    max_family_graphs: int = 6  # graphs per form, each with more lifted constants
    compile_queue: int = 64  # jobs that may wait for the compile thread
    compile_idle: float = 5.0  # seconds after which an idle compile thread ends
    slow_seconds: float = 2.0  # after which a compilation is logged (`base/slow_notice`)
    wrapper_patience: float = 0.05  # seconds to wait for other threads' launches before wrappers are removed

    # On disk (`compile/disk_store`, `compile/backend_choice`, `compile/xla_code_cache`).

    store_bytes: int = 1 << 29  # beyond, least recently used entries are deleted until a fifth of this is free
    store_abandoned: float = 3600.0  # seconds after which an unfinished temporary file is deleted
    choice_age: float = 30 * 86400.0  # seconds after which a choice expires: the machine may have been busy
    code_lingers: float = 60.0  # seconds that code stays in memory, as another thread may be about to read it

    # Lowering.

    # Bytes: only small results are shared. A program may compute a large one twice in order to hold it less long.
    max_shared_result: int = 1 << 14
    max_check_chain: int = 16  # scalars combined one by one, which XLA does for free; more are packed into one tensor
    # Operations that a loop must save, as XLA takes longer for a loop than for its body. (A NASRNN's step takes 3.0 s
    # of CPU time at 3 iterations, unrolled; 4.7, and 3.9 rerolled, at 10; 11.5 and 4.7 at 40.)
    min_folded: int = 64
    # Bytes: larger tensors that are computed one by one are not stacked for iterations that are independent of each
    # other. Variables never are, as each launch would copy all of them: 48 equal layers with weights of their own (256
    # by 256) took 2.4 s to compile rerolled, and 0.75 s unrolled, as XLA compiles equal kernels once; a launch took
    # 9.7 ms, and 6.4.
    max_fold_copied: int = 1 << 12
    max_turn_inputs: int = 16  # operations with more are not part of an iteration: they sum or stack its results
    min_repeats: int = 3  # iterations; fewer are not worth a loop
    fold_periods: int = 24  # the most frequent repeat distances, which are tried as periods
    # Operations: smaller parts are not outlined. A launch by XLA takes 16 us, TensorFlow's kernels some 2 us each.
    min_outlined: int = 8
    # A branch with no more operations, on no more bytes, computes both sides and selects: that is cheaper than finding
    # out which side is needed.
    select_operations: int = 8
    select_bytes: int = 1 << 14

    # Validation (`launch/validate`, `launch/rounding`).

    validation_ties: int = 1  # values in a hundred that may differ by more, as a comparison may flip on a tie
    # Where values differ by more, the operations run again, this many times, with perturbed last digits. Whatever that
    # changes was rounding noise (the gradient of a bias in front of a normalisation, the loss of a confident
    # classifier), and compiled code may differ there by this many times as much.
    validation_shakes: int = 3
    validation_margin: float = 16.0
    rounding_places: float = 4.0  # units in the last place of the perturbation: inputs may be rounded results

    # Audits: launches that are validated again (`launch/audits`), in a function's first calls, as time permits.
    audit_share: float = 0.01  # of the time of the function's calls
    audit_calls: int = 1000
    audit_first: int = 8  # launches of an executable before its first audit,
    audit_growth: int = 4  # and the factor from each audit to the next
    audit_per_operation: float = 1e-4  # expected seconds of an audit per operation,
    audit_launches: int = 8  # and in launches

    # Memoized calls (`memoize/entry`, `guards/state`, `memoize/shape_variants`).

    max_regions: int = 64  # after one step
    max_regions_once: int = 8  # of one function, with keys seen only once: a key may contain a message with a number
    max_region_changes: int = 16  # writes to its objects before a region is refused
    # A region's Python runs again after this many uses, then at intervals ten times as long, up to the second value.
    # An MLP's step takes 0.2 ms if its four regions are skipped, and 35 if they run: every thousandth cost a sixth.
    # After ten uses, calls 11 to 30 of a tagger took 122 ms of CPU time instead of 58 (eagerly 1876), of style transfer
    # 63 instead of 36 (355), and of a matrix factorisation 52 instead of 16 (210); medians of three processes.
    region_first_check: int = 100
    region_last_check: int = 4000
    # A refused region is tried again after this many calls, then at doubling intervals, up to the second value.
    region_first_retry: int = 2
    region_last_retry: int = 1000
    # Followed calls of a function in which library calls are learnt at their first visit. In later ones most such calls
    # never recur, as on ever new paths; so they are learnt at their second visit.
    calls_learnt_at_once: int = 3
    # Library calls of a recorded call count as the first of the two runs that must agree: the operations of such a call
    # beyond which they are not kept, and the followed calls for which they are.
    max_recorded_operations: int = 20_000
    recorded_runs_kept: int = 4
    max_recorded_candidates: int = 8  # recorded calls of one function with which an observed one is compared
    # Consecutive runs with other findings than the previous one, until the region is refused: an observed run takes
    # twice the time.
    region_disagreements: int = 3
    max_known_types: int = 1000  # of values; a program may keep creating types
    # The most that is compared, before each memoized call, of a list, a set or an array that a library call has read.
    max_watched_items: int = 1024
    max_watched_bytes: int = 1024
    max_known_codes: int = 20_000  # whose names are kept, and modules whose globals are
    max_lookups: int = 3000  # lines of the guard of one region's Python code
    max_twins: int = 4  # shape variants of one call at one place that are compared: in training and not, say
    max_twin_places: int = 4096
    max_array: int = 1 << 20  # bytes of an array that such a call makes, as of positions, and is fed
    few_sizes: int = 16  # integers in a constant that TensorFlow's gradients make of sizes, and keep
    max_other_keys: int = 256  # of calls, by what matters of them alone, of one function
    max_reported: int = 1000  # reasons why library calls are not memoized: finding the place takes time
    max_frames_inside: int = 8  # between a library call and an operation by which it is known to have been made
    max_keys_at_place: int = 64  # of calls: one that is given another object each time has a new key each time
    max_notes: int = 8  # of one step: a layer that gets ever-changing numbers adds one each time
    note_depth: int = 8  # levels of nested lists
    note_length: int = 1000  # of strings

    # Async launches (`dispatch/host_gaps`, `launch/async_launch`).

    # Seconds of a host gap: a round trip to another thread takes 0.3 ms, and the extra segment costs a launch.
    pause_long: float = 2e-3
    # Seconds more for each operation before the gap: the segment that ends there has to be compiled, at 0.25 ms per
    # operation, twice.
    pause_longer: float = 1e-5
    pause_share: float = 0.1  # of the call's time; shorter gaps in a long call are not worth it
    pause_timed: tuple[int, ...] = (8, 9)  # the two calls that are timed and compared; empty: none
    pause_operations: int = 8  # smaller segments are not launched as a whole
    launch_threads: int = 2  # for calls on several threads of the program; more would only compete for cores
    flight_worth: float = 5e-4  # seconds that Python should run meanwhile: a round trip to the thread takes 0.3 ms

    # What one call may spend on its own thread on observing and compiling (`base/budget`): no call should take more
    # than five times its time without this package, plus two seconds.
    call_times: float = 4.0  # what a call may spend, as a multiple of its time without this package,
    call_seconds: float = 1.5  # and in addition; the rest of the two seconds is for what is not measured
    graph_operation: float = 3.5e-4  # seconds to compile an operation into a graph, and launch it for the first time
    # Visits after which a segment that no call has the budget for (some 5,000 operations) is compiled all the same: it
    # pays from then on. One call is delayed, by 3.3 s for 9,500 operations.
    hopeless_visits: int = 4
    eager_operation: float = 1.5e-5  # seconds that an operation takes at least if the program issues it
    timer_near: float = 1.0  # seconds; a one-shot timer due later than that is not a sampler

    # Errors (`follow/follower`).

    max_faults: int = 3  # calls in which the runtime itself failed; after them the function runs imperatively
    max_raised_again: int = 1000  # operations of a call that re-raise a failure that the program could not catch
    forced_event: int = -1  # for tests: the number of the operation at which the cursor reports a mismatch

    # Decisions of functions of which nobody has said who decides (`dispatch/decision_policy`).

    # By the `while` loops of one call, with which the device gets control. (A loop of a hundred iterations took 0.02 of
    # the time with Python's decisions: `python -m examples.bench --case=while-loop --quick`.) And calls in a row in
    # which the device took none, after which Python decides for good.
    decisions_many: int = 24
    decisions_in_vain: int = 6

    # Decisions on the device (`control_flow/run/decisions`, `control_flow/run/placement`).

    # Decisions at a place before its statement is staged, which takes as long as some hundred operations.
    decision_patience: int = 16
    decision_patience_known: int = 2  # the same in a function that is known to take many
    decision_samples: int = 16  # iterations that are timed
    max_decisions: int = 4096  # places
    max_callers: int = 4096  # call sites
    max_staged: int = 4  # stagings of a loop, for other shapes or Python values
    max_staged_branches: int = 64  # stagings of a branch, which may belong to a stack of layers
    max_stage_refused: int = 16
    max_stage_again: int = 32
    max_stage_idle: int = 4  # visits on which a loop made no iteration on the device, but some in Python
    # Calls of each placement, device and Python: after the first few, in which things are still observed, they are
    # compared after this many, and after two, three and four times as many; the faster one wins if it takes less than a
    # share of the other's time. Otherwise the device keeps the statement, unless Python is faster by more than equal
    # calls differ on a busy machine. A difference counts if it is more than this many standard errors.
    contest_first: int = 2
    contest_trials: int = 8
    contest_most: int = 64
    contest_clear: float = 0.85
    contest_margin: float = 0.95
    contest_sure: float = 3
    contest_unusual: float = 3  # times the usual: outliers, which hit a busy moment, are clipped to this
    contest_calls: int = 256  # in all, as calls in which something was new do not count

    # Traced statements (`control_flow/trace`).

    max_device_turns: int = 10_000  # iterations of a loop per launch, between which Python may be interrupted
    max_counted: int = 1 << 27  # Python ints that a loop counts, as int32; leaves room for sums of some
    max_python_turns: int = 256  # iterations of a loop over Python values, which is unrolled
    max_staged_depth: int = 16  # nested calls that are staged
    max_turns_apart: int = 8  # last iterations that a VJP stages separately; each takes as many operations as the body
    max_read_handles: int = 1024
    list_rows: int = 32  # of a buffer, until a loop is seen to need more
    max_list_bytes: int = 1 << 24  # of a buffer
    min_turn_room: int = 8  # iterations whose states can be saved for gradients
    max_turn_bytes: int = 1 << 28  # saved for gradients in one launch
    max_unwinding_flags: int = 3  # per call or `if`: they say which of its results have a cotangent
    max_recursion: int = 3000  # nested calls on the device
    recursion_margin: int = 100  # Python frames left for what the innermost call calls
    max_recursion_stagings: int = 12  # of one function, until what its calls have in common is stable

    # Export (`export/mutation_snapshot`).

    max_export_places: int = 20_000  # that a step could mutate

    # Reports (`base/timeline`, `reporting`).

    timeline_first: int = 5000  # events that are kept from the beginning, in which things are learnt and compiled
    timeline_last: int = 45_000  # and from the end; an event takes some 250 bytes
    rate_interval: float = 0.05  # seconds, of the step rate; doubled when there are more of them than
    rate_intervals: int = 400
    report_functions: int = 64  # that are held until the report is written
    summary_causes: int = 4  # shown of a function in a notebook
    report_text: int = 400  # characters of an event's or a cause's text
    # Of the drawn graph: the most blocks in one iteration of what repeats, the fewest iterations that are folded, and
    # of a chain that does not repeat the blocks from which on it is folded, too, and those of one part.
    graph_period: int = 32
    graph_turns: int = 3
    graph_long: int = 24
    graph_part: int = 64

    # Training.

    # Steps that are launched together: as many as these bounds allow, found by doubling.
    max_steps_together: int = 8
    max_operations_together: int = 2000  # of one launch: bounds the compile time
    max_bytes_together: int = 1 << 25  # of their batches, which are held until the launch
    together_patience: int = 16  # consecutive calls of nothing but memoized steps before more are launched together
    together_doubt: int = 8  # consecutive other calls before steps are launched one by one again
    data_patience: float = 1.0  # seconds that a data-preparing thread has to end
    progress_interval: float = 0.1  # seconds between updates of the progress line
    progress_width: int = 120  # characters of that line in a notebook, which does not say how wide it is
    signal_grace: float = 1.0  # seconds that a running step has to finish after Ctrl-C

    # The search of `python -m coexec run` for hot loops (`cli/hot_loops`). A look takes some 50 us.

    search_interval: float = 0.01  # seconds between two looks
    search_samples: int = 500  # in eager operations, after which it ends
    search_calls: int = 5  # in which a function has to be seen
    search_share: float = 0.2  # of those samples, in which it has to be
    search_bare: int = 50  # the fewest of them from which to tell of a loop whose body is no function


tuning = Tuning()


@contextlib.contextmanager
def tuned(**changes: Any) -> Iterator[None]:
    """Sets values by name within a scope, on all threads, and restores them when it ends, also by an exception."""
    before = {name: getattr(tuning, name) for name in changes}
    try:
        for name, value in changes.items():
            setattr(tuning, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(tuning, name, value)
