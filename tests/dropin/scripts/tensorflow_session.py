"""A graph and a monitored session with the broadcast hook, as written for Horovod and TensorFlow 1."""

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd

v1 = tf.compat.v1
v1.disable_eager_execution()
v1.logging.set_verbosity(v1.logging.INFO)

hvd.init()

image = v1.placeholder(tf.float32, [None, 16], name="image")
label = v1.placeholder(tf.float32, [None, 1], name="label")
hidden = tf.nn.tanh(tf.matmul(image, v1.get_variable("first", [16, 8])) + v1.get_variable("bias", [8]))
predicted = tf.matmul(hidden, v1.get_variable("second", [8, 1]))
loss = tf.reduce_mean(tf.square(predicted - label))

opt = v1.train.AdamOptimizer(0.01 * hvd.size())
opt = hvd.DistributedOptimizer(opt)
global_step = v1.train.get_or_create_global_step()
train_op = opt.minimize(loss, global_step=global_step)
mean_loss = hvd.allreduce(loss, name="mean_loss")
total = tf.add_n([tf.reduce_sum(tf.abs(one)) for one in v1.trainable_variables()])

hooks = [
    hvd.BroadcastGlobalVariablesHook(0),
    v1.train.StopAtStepHook(last_step=300 // hvd.size()),
    v1.train.LoggingTensorHook(tensors={"step": global_step, "loss": loss}, every_n_iter=50),
]
config = v1.ConfigProto()
config.gpu_options.allow_growth = True
config.gpu_options.visible_device_list = str(hvd.local_rank())
checkpoint_dir = "./checkpoints" if hvd.rank() == 0 else None

random = np.random.default_rng(hvd.rank())
truth = np.random.default_rng(100).normal(size=(16, 1))
with v1.train.MonitoredTrainingSession(checkpoint_dir=checkpoint_dir, hooks=hooks, config=config) as session:
    while not session.should_stop():
        given = random.normal(size=(64, 16))
        feed = {image: given, label: np.tanh(given @ truth)}
        _, mean, weights = session.run([train_op, mean_loss, total], feed_dict=feed)

# The values read with the last step may be from before or after it, but all ranks get the same mean.
print(f"rank {hvd.rank()}: mean loss {mean:.9g}")
