"""What the engine uses of vLLM, most of it below vLLM's public interface.

`tests/engines/test_vllm_contract.py` compares this list with every release that pyproject allows
and the newest beyond (as recorded in `vllm_contract.json`), with the installed release, and with
the engine's code. When the engine uses something new, add it here and record it with
`python tests/vllm_contract.py`.
"""

TOUCHED: dict[str, tuple[str, ...]] = {
    "vllm.v1.attention.backends.cpu_attn": (
        "CPUAttentionBackend.get_supported_head_sizes() -> list[int]",
    ),
    "vllm.engine.arg_utils": (
        "EngineArgs(model=, dtype=, max_model_len=, max_num_seqs=, seed=, enforce_eager=,"
        " kv_cache_memory_bytes=, enable_prefix_caching=, logprobs_mode=, skip_tokenizer_init=,"
        " generation_config=, async_scheduling=, disable_log_stats=, use_tqdm_on_load=,"
        " tensor_parallel_size=, distributed_executor_backend=, block_size=,"
        " enable_chunked_prefill=, max_num_batched_tokens=, gpu_memory_utilization=,"
        " enable_sleep_mode=, enable_lora=, max_lora_rank=, lora_target_modules=,"
        " weight_transfer_config=)",
        "EngineArgs.create_engine_config()",
    ),
    "vllm.sampling_params": (
        "SamplingParams(temperature=, top_p=, top_k=, min_p=, max_tokens=, seed=, ignore_eos=,"
        " stop_token_ids=, logprobs=, detokenize=, extra_args=)",
    ),
    "vllm.config.vllm": (
        "VllmConfig.cache_config",
        "VllmConfig.device_config",
        "VllmConfig.model_config",
    ),
    "vllm.config.cache": ("CacheConfig.block_size",),
    "vllm.config.device": ("DeviceConfig.device",),
    "vllm.config.model": ("ModelConfig.get_vocab_size() -> int",),
    "vllm.v1.engine.llm_engine": (
        "LLMEngine.from_vllm_config(config, disable_log_stats=)",
        "LLMEngine.engine_core",
        "LLMEngine.add_request(id, prompt, params, lora_request=) -> str",
        "LLMEngine.abort_request(ids)",
        "LLMEngine.collective_rpc(method) -> list[_R]",
        "LLMEngine.collective_rpc(method, args=) -> list[_R]",
        "LLMEngine.reset_prefix_cache() -> bool",
        "LLMEngine.sleep(level=)",
        "LLMEngine.wake_up()",
    ),
    "vllm.v1.engine": (
        "EngineCoreOutputs.outputs",
        "EngineCoreOutput.request_id",
        "EngineCoreOutput.new_token_ids",
        "EngineCoreOutput.new_logprobs",
        "EngineCoreOutput.finish_reason",
        "EngineCoreOutput.prefill_stats",
    ),
    "vllm.v1.outputs": ("LogprobsLists.logprobs",),
    "vllm.v1.metrics.stats": ("PrefillStats.num_cached_tokens",),
    "vllm.v1.engine.core_client": (
        "InprocClient.engine_core",
        "InprocClient.get_output() -> EngineCoreOutputs",
        "InprocClient.shutdown()",
    ),
    "vllm.v1.engine.core": (
        "EngineCore.scheduler",
        "EngineCore.model_executor",
        "cleanup_dist_env_and_memory",  # replaced where the core looks it up
    ),
    "vllm.distributed.parallel_state": (
        "cleanup_dist_env_and_memory()",
        "destroy_distributed_environment()",
        "_WORLD",
        "_NODE_COUNT",
        "GroupCoordinator.destroy()",
    ),
    "vllm.v1.executor.multiproc_executor": (
        "MultiprocExecutor.is_failed",
        "MultiprocExecutor.workers",
        "MultiprocExecutor.shutdown()",
    ),
    "vllm.v1.core.sched.scheduler": (
        "Scheduler.kv_cache_manager",
        "Scheduler.waiting",
        "Scheduler.get_request_counts() -> tuple[int, int]",
    ),
    "vllm.v1.core.kv_cache_manager": ("KVCacheManager.block_pool",),
    "vllm.v1.core.block_pool": (
        "BlockPool.num_gpu_blocks",
        "BlockPool.get_num_free_blocks() -> int",
    ),
    "vllm.v1.request": (
        "Request.request_id",
        "Request.num_preemptions",
    ),
    "vllm.v1.sample.sampler": ("batched_count_greater_than(logprobs, values)",),
    "vllm.v1.worker.gpu_worker": (
        "Worker.model_runner",
        "Worker.get_model()",
        "Worker.add_lora(request)",
        "Worker.reload_weights(weights_iterator=)",
        "Worker.distributed_init_method",
        "Worker.device",
        "Worker.weight_transfer_engine",
        "Worker.init_weight_transfer_engine(info)",
        "Worker.start_weight_update()",
        "Worker.update_weights(info)",
        "Worker.finish_weight_update()",
    ),
    "vllm.v1.worker.cpu_worker": (
        "CPUWorker.model_runner",
        "CPUWorker.get_model()",
        "CPUWorker.add_lora(request)",
        "CPUWorker.reload_weights(weights_iterator=)",
    ),
    "vllm.distributed.weight_transfer.nccl_common": (
        "trainer_init(info)",
        "NCCLWeightTransferInitInfo(master_address=, master_port=, rank_offset=, world_size=)",
    ),
    "vllm.distributed.weight_transfer.nccl_engine": (
        "NCCLWeightTransferEngine.init_info_cls",
        "NCCLWeightTransferEngine.update_info_cls",
        "NCCLWeightTransferEngine.model_update_group",
        "NCCLWeightTransferUpdateInfo(names=, dtype_names=, shapes=)",
    ),
    "vllm.distributed.device_communicators.pynccl": (
        "PyNcclCommunicator.disabled",
        "PyNcclCommunicator.broadcast(data, src=, stream=)",
        "PyNcclCommunicator.destroy()",
    ),
    "vllm.v1.worker.gpu_model_runner": (
        "GPUModelRunner.input_batch",
        "GPUModelRunner.reload_weights(weights_iterator=)",
    ),
    "vllm.v1.worker.gpu.model_runner": (
        "GPUModelRunner.req_states",
        "GPUModelRunner.reload_weights(weights_iterator=)",
    ),
    "vllm.v1.worker.gpu_input_batch": (
        "InputBatch.generators",
        "InputBatch.add_request(request)",
        "CachedRequestState.sampling_params",
        "CachedRequestState.generator",
    ),
    "vllm.v1.worker.lora_model_runner_mixin": ("LoRAModelRunnerMixin.lora_manager",),
    "vllm.lora.request": ("LoRARequest(lora_name=, lora_int_id=, lora_path=, load_inplace=)",),
    "vllm.lora.lora_model": ("LoRAModel.loras",),
    "vllm.lora.worker_manager": ("WorkerLoRAManager._adapter_manager",),
    "vllm.lora.model_manager": (
        "LoRAModelManager.modules",
        "LoRAModelManager.get_adapter(adapter_id)",
    ),
    "vllm.platforms": ("current_platform",),
    "vllm.platforms.interface": ("Platform.device_type",),
    "vllm.model_executor.layers.vocab_parallel_embedding": (
        "VocabParallelEmbedding.quant_method",
        "UnquantizedEmbeddingMethod.process_weights_after_loading(layer)",
    ),
    "vllm.envs": (
        "disable_envs_cache()",
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "VLLM_LOGGING_LEVEL",
        "VLLM_NO_USAGE_STATS",
        "VLLM_WORKER_MULTIPROC_METHOD",
        "VLLM_CPU_OMP_THREADS_BIND",
    ),
}
"""Module -> attributes, and calls with the arguments that the engine gives and the type it uses."""
