"""Training on a tf.data service, as users write it. Arguments: the compute job's file and what to share."""

import argparse

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd
from horovod.tensorflow.data.compute_service import TfDataServiceConfig, tf_data_service

parser = argparse.ArgumentParser()
parser.add_argument("configfile")
parser.add_argument("--reuse-dataset", action="store_true")
parser.add_argument("--round-robin", action="store_true")
args = parser.parse_args()

hvd.init()
config = TfDataServiceConfig.read(args.configfile, wait_for_file_creation=True)

COUNT = 60
data = tf.data.Dataset.range(COUNT)
if args.round_robin:
    data = data.repeat()
if config.dispatcher_side == "compute":
    data = data.send_to_data_service(
        config, hvd.rank(), hvd.size(), reuse_dataset=args.reuse_dataset, round_robin=args.round_robin
    )
    if args.round_robin:
        data = data.take(15)
    seen = list(data.as_numpy_iterator())
else:
    with tf_data_service(config, hvd.rank()) as address:
        data = data.apply(tf.data.experimental.service.distribute(
            processing_mode="distributed_epoch", service=address,
            job_name="job" if args.reuse_dataset else None,
        ))
        seen = list(data.as_numpy_iterator())

every = hvd.allgather_object(sorted(int(one) for one in seen))
if hvd.rank() == 0:
    print("counts:", *[len(one) for one in every])
    times = np.bincount(np.concatenate(every).astype(int), minlength=COUNT)
    print("times each:", sorted(set(times.tolist())))
    config.compute_client(verbose=2).shutdown()
