"""Where the official workflow templates of ComfyUI download files from."""
# comfyui-workflow-templates-json 0.1.123.

from __future__ import annotations

HUB = "https://huggingface.co/"


def hub(repository: str, *names: str, folder: str = "split_files/diffusion_models") -> dict[str, str]:
    """File name -> its address in a Hugging Face repository; folder: inside the repository, "" = its root."""
    start = f"{HUB}{repository}/resolve/main/{folder}/" if folder else f"{HUB}{repository}/resolve/main/"
    return {name: start + name for name in names}


# Text encoders and autoencoders that several models share.
SHARED: dict[str, str] = {
    **hub("Comfy-Org/z_image_turbo", "qwen_3_4b.safetensors", folder="split_files/text_encoders"),
    **hub("Comfy-Org/Lumina_Image_2.0_Repackaged", "ae.safetensors", folder="split_files/vae"),
    **hub("Comfy-Org/Qwen-Image_ComfyUI", "qwen_image_vae.safetensors", folder="split_files/vae"),
    **hub(
        "Comfy-Org/HunyuanVideo_1.5_repackaged",
        "qwen_2.5_vl_7b_fp8_scaled.safetensors",
        folder="split_files/text_encoders",
    ),
    **hub("comfyanonymous/flux_text_encoders", "t5xxl_fp16.safetensors", "clip_l.safetensors", folder=""),
    **hub("Comfy-Org/HiDream-I1_ComfyUI", "t5xxl_fp8_e4m3fn_scaled.safetensors", folder="split_files/text_encoders"),
    **hub("Comfy-Org/flux2-dev", "flux2-vae.safetensors", folder="split_files/vae"),
    **hub(
        "Comfy-Org/flux2-dev",
        "mistral_3_small_flux2_bf16.safetensors",
        "mistral_3_small_flux2_fp8.safetensors",
        folder="split_files/text_encoders",
    ),
    **hub("Comfy-Org/flux2-klein-9B", "qwen_3_8b_fp8mixed.safetensors", folder="split_files/text_encoders"),
    **hub(
        "Comfy-Org/Wan_2.1_ComfyUI_repackaged",
        "umt5_xxl_fp8_e4m3fn_scaled.safetensors",
        folder="split_files/text_encoders",
    ),
    **hub(
        "Comfy-Org/Wan_2.2_ComfyUI_Repackaged",
        "wan_2.1_vae.safetensors",
        "wan2.2_vae.safetensors",
        folder="split_files/vae",
    ),
    **hub("Comfy-Org/Qwen3-VL", "qwen3vl_4b_fp8_scaled.safetensors", folder="text_encoders"),
    **hub("Comfy-Org/ERNIE-Image", "ministral-3-3b.safetensors", folder="text_encoders"),
    **hub("Comfy-Org/MiniMax-H3", "qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors", folder="text_encoders"),
    **hub(
        "Comfy-Org/MiniMax-H3",
        "minimax_h3_video_vae_int8_convrot.safetensors",
        "minimax_h3_video_vae_fp16.safetensors",
        "minimax_h3_audio_vae_fp32.safetensors",
        folder="vae",
    ),
}


def shared(*names: str) -> dict[str, str]:
    return {name: SHARED[name] for name in names}
