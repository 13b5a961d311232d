"""``python -m horovod.tensorflow.data.compute_worker FILE``: the workers of a tf.data service."""

from ringdance.tensorflow.data.compute_worker import main, run_worker

__all__ = ["main", "run_worker"]

if __name__ == "__main__":
    main()
