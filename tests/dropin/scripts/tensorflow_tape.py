"""A loop with a gradient tape and tf.data, as users write it for Horovod and TensorFlow 2."""

import tensorflow as tf

import horovod.tensorflow as hvd

hvd.init()

gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

# Generated images that are easy to classify: class k has a bright row k.
labels = tf.range(1000, dtype=tf.int64) % 10
images = tf.random.stateless_uniform((1000, 10, 10, 1), seed=(1, 2))
images += tf.one_hot(labels, 10)[:, :, None, None]
dataset = tf.data.Dataset.from_tensor_slices((images, labels))
dataset = dataset.repeat().shuffle(1000, seed=hvd.rank()).batch(32)

model = tf.keras.Sequential([
    tf.keras.layers.Conv2D(8, [3, 3], activation="relu"),
    tf.keras.layers.MaxPooling2D(pool_size=(2, 2)),
    tf.keras.layers.Dropout(0.25),
    tf.keras.layers.Flatten(),
    tf.keras.layers.Dense(32, activation="relu"),
    tf.keras.layers.Dense(10, activation="softmax"),
])
loss = tf.losses.SparseCategoricalCrossentropy()
opt = tf.optimizers.Adam(0.001 * hvd.size())

checkpoint_dir = "./checkpoints"
checkpoint = tf.train.Checkpoint(model=model)


@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        probs = model(images, training=True)
        loss_value = loss(labels, probs)

    tape = hvd.DistributedGradientTape(tape)
    grads = tape.gradient(loss_value, model.trainable_variables)
    opt.apply_gradients(zip(grads, model.trainable_variables))  # noqa: B905

    # After the first gradient step, so that the optimizer's variables exist.
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        variables = opt.variables() if callable(opt.variables) else opt.variables
        hvd.broadcast_variables(variables, root_rank=0)
    return loss_value


for batch, (images, labels) in enumerate(dataset.take(240 // hvd.size())):
    loss_value = training_step(images, labels, batch == 0)
    if batch % 20 == 0 and hvd.rank() == 0:
        print(f"Step #{batch}\tLoss: {loss_value:.6f}")

total = float(sum(tf.reduce_sum(tf.abs(one)) for one in model.trainable_variables))
print(f"rank {hvd.rank()}: weights {total!r}")
if hvd.rank() == 0:
    checkpoint.save(checkpoint_dir + "/model")
    print(f"last loss: {loss_value:.6f}")
