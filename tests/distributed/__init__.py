"""How a distributed test is written: some ranks run a function, plain torch in one process says
what must come out.

1. **The job** is a function at module level, which the pool's workers import by name. It takes and
   returns plain data (configs, floats, strings). It makes what it tests from them on its rank, and
   asserts what only a rank can see.
2. **The world.** The fixture `world` gives a pool of n resident processes: `world(4).run(job,
   *args)` calls the job on each of four ranks in a process group of its own, and returns the ranks'
   answers in order. A rank that raises fails the test with that rank's traceback. A new pool takes
   seconds and a job milliseconds: several cases go into one job.
3. **The reference** is plain torch in the test's own process, with none of the project's layers,
   from the same global weights and the same global batch. It is cached, since many layouts have the
   same one.
4. **The comparison** is one assertion that says what may differ and by how much. All ranks must
   have given one answer.

What the files here share is a file `*_cases.py` for each thing that is tested; each has the things
in small, the reference and the comparison:

| file | what is run | its reference | the comparison |
|---|---|---|---|
| `training_cases.py` | a trainer of a recipe: its curve of losses and norms | `plain_curve` | `assert_follows` |
| `layer_cases.py` | a layer over tp: its output and gradients | a function of the global weights | `check_all` |
| `pipeline_cases.py` | the runtime with stages of plain torch | the stages in one process | `Pipeline.check_step` |
| `fuzz_cases.py` | random recipes | plain torch, or one process | `assert_follow` |
| `local_sgd_cases.py` | replicas that train apart | `PlainDiloco` | `assert_follows` |

`tests/distributed/test_training.py` is the shortest to read first. A module whose jobs import
something heavy names it in `PRELOAD`. Tests of the launcher (`tests/test_launch.py`) have no pool:
they start `parallel3d-train`'s own workers.
"""  # noqa: E501
