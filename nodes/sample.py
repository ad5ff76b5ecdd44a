"""NativeDiTSample, NativeDiTModelSampling: KSampler with the publisher's settings, and the time shift on its own."""

from ..host import AUTO, Graph, current_host
from .io import io

LARGEST_SEED = 0xFFFFFFFFFFFFFFFF


def _shift_input():
    return io.Float.Input(
        "shift",
        default=0.0,
        min=0.0,
        max=100.0,
        step=0.01,
        tooltip="Time shift: more than 1 spends more steps on the layout, fewer on details. 0 = the publisher's, which "
        "for some models follows the picture's size.",
    )


class NativeDiTSample(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        host = current_host()
        return io.Schema(
            node_id="NativeDiTSample",
            display_name="Sample (NativeDiT)",
            category="NativeDiT/sampling",
            description="KSampler that knows the model: whatever is left at 0, -1 or auto is what its publisher uses. "
            "The settings used are shown on the node and kept in the picture.",
            inputs=[
                io.Model.Input("model", tooltip="The model to sample."),
                io.Conditioning.Input("positive", tooltip="What the picture shall show."),
                io.Conditioning.Input("negative", tooltip="What it shall not show; unused at cfg 1."),
                io.Latent.Input("latent_image", tooltip="An empty latent, or one to start from."),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=LARGEST_SEED,
                    control_after_generate=True,
                    tooltip="The same seed gives the same picture.",
                ),
                io.Int.Input("steps", default=0, min=0, max=10000, tooltip="Number of steps; 0 = the publisher's."),
                io.Float.Input(
                    "cfg",
                    default=-1.0,
                    min=-1.0,
                    max=100.0,
                    step=0.1,
                    round=0.01,
                    tooltip="How closely the prompt is followed; 1 = without the negative prompt, below 0 = the "
                    "publisher's.",
                ),
                io.Combo.Input(
                    "sampler_name",
                    options=[AUTO, *host.samplers()],
                    default=AUTO,
                    tooltip="auto = the publisher's sampler.",
                ),
                io.Combo.Input(
                    "scheduler",
                    options=[AUTO, *host.schedulers()],
                    default=AUTO,
                    tooltip="auto = the publisher's schedule, to the digit where the model has one of its own.",
                ),
                _shift_input(),
                io.Float.Input(
                    "denoise",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="Below 1, some of latent_image is kept.",
                ),
            ],
            outputs=[io.Latent.Output(tooltip="For VAE Decode.")],
            hidden=[io.Hidden.prompt, io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls,
        model,
        positive,
        negative,
        latent_image,
        seed,
        steps=0,
        cfg=-1.0,
        sampler_name=AUTO,
        scheduler=AUTO,
        shift=0.0,
        denoise=1.0,
    ):
        prompt, node_id = cls.hidden.prompt, cls.hidden.unique_id
        sampled = current_host().sample(
            model,
            positive,
            negative,
            latent_image,
            seed=seed,
            steps=steps,
            cfg=cfg,
            sampler=sampler_name,
            scheduler=scheduler,
            shift=shift,
            denoise=denoise,
            graph=Graph(prompt, node_id=node_id),
        )
        _keep(prompt, node_id, sampled.settings.as_dict())
        return io.NodeOutput(sampled.latent, ui={"text": [sampled.settings.text]})


def _keep(prompt, node_id, settings):
    """Beside the node's title in the prompt, which every picture of this run carries; inputs stay as they were."""
    own = (prompt or {}).get(str(node_id))
    if own is not None:
        own.setdefault("_meta", {})["nativedit"] = settings


class NativeDiTModelSampling(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="NativeDiTModelSampling",
            display_name="Model Sampling (NativeDiT)",
            category="NativeDiT/sampling",
            description="Sets a model's time shift. For custom sampling, where schedules are made without knowing the "
            "latent, connect the latent and leave shift at 0. KSampler and Sample (NativeDiT) do that by themselves.",
            inputs=[
                io.Model.Input("model", tooltip="The model whose sampling is set."),
                _shift_input(),
                io.Latent.Input(
                    "latent", optional=True, tooltip="The latent that will be sampled; its size settles a shift of 0."
                ),
            ],
            outputs=[io.Model.Output(tooltip="For samplers, schedulers and guiders.")],
        )

    @classmethod
    def execute(cls, model, shift=0.0, latent=None):
        return io.NodeOutput(current_host().set_model_sampling(model, shift=shift, latent=latent))
