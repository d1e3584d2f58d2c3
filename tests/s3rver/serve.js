// An S3 server on a free port of this machine: node serve.js FOLDER BUCKET. Prints its port.
const S3rver = require("@20minutes/s3rver");

const [directory, bucket] = process.argv.slice(2);
const options = { port: 0, address: "127.0.0.1", silent: true, directory };
new S3rver({ ...options, configureBuckets: [{ name: bucket }] })
  .run()
  .then(({ port }) => console.log(port));
