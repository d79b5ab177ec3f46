-- Health of RLRun objects for Argo CD: resource.customizations.health.slipstream.dev_RLRun of argocd-cm.
local health = {status = "Progressing", message = "the controller has not seen the object"}
local status = obj.status
if status == nil or status.phase == nil then
  return health
end
if status.observedGeneration ~= nil and obj.metadata.generation ~= nil
    and status.observedGeneration < obj.metadata.generation then
  health.message = "the controller has not applied the newest spec"
  return health
end
local kinds = {
  Succeeded = "Healthy", Running = "Healthy",
  Paused = "Suspended", Suspended = "Suspended", Cancelled = "Suspended",
  Failed = "Degraded", Rejected = "Degraded", Lost = "Degraded", Deleted = "Missing"
}
health.status = kinds[status.phase] or "Progressing"
health.message = status.message or status.phase
for _, condition in ipairs(status.conditions or {}) do
  if condition.type == "SpecRejected" and condition.status == "True" then
    health.status = "Degraded"
    health.message = condition.message or condition.reason
  elseif condition.type == "Progressing" and condition.status == "False" and status.phase == "Running" then
    health.status = "Progressing"
    health.message = condition.message or condition.reason
  end
end
return health
